"""Run a copy of a model on inputs and watch: which submodules are called, and what else normalises."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from rmsrepro.config.errors import first_line
from rmsrepro.norms.inspecting.report import EVALUATION, TRAINING, Call
from rmsrepro.norms.inspecting.tracing import FunctionWatch, OperationWatch, Seen
from rmsrepro.norms.probing.subject import undisturbed
from rmsrepro.norms.targets import arguments


@dataclass
class Run:
    """What was seen."""

    shapes: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """Shapes of the first argument, by the submodule's path."""
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    """Calls by path, for training and evaluation."""
    calls: list[Call] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class _Watch:
    """The submodules that are running, innermost last, and those that ran."""

    paths: Mapping[int, str]
    stack: list[nn.Module] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    shapes: dict[str, dict[tuple[int, ...], None]] = field(default_factory=dict)

    @property
    def place(self) -> tuple[str, str]:
        """Path and class name of the innermost submodule."""
        if not self.stack:
            return "", ""
        return self.paths[id(self.stack[-1])], type(self.stack[-1]).__name__

    @contextmanager
    def watching(self) -> Iterator[None]:
        # Hooks of all modules and not of each: torch's encoder layers take another path when they have some.
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        path = self.paths.get(id(module))
        if path is None:
            return
        self.stack.append(module)
        self.counts[path] += 1
        if args and isinstance(args[0], Tensor):
            self.shapes.setdefault(path, {})[tuple(args[0].shape)] = None

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.stack and self.stack[-1] is module:
            self.stack.pop()


class _NoCopy(Exception):
    """A model that cannot be copied; the message says why."""


def run_model(model: nn.Module, inputs: object) -> Run:
    """Run copies of `model` in evaluation and in training.

    Raises:
        ValueError: it runs in neither.
    """
    run = Run()
    seen: dict[str, list[Seen]] = {}
    failures: dict[str, str] = {}
    with undisturbed():
        for mode in (EVALUATION, TRAINING):
            try:
                run.counts[mode], seen[mode] = _watch(run, model, inputs, mode)
            except _NoCopy as error:
                return Run(notes=[f"the model was not run, for it cannot be copied ({error})"])
            except (Exception, SystemExit) as error:  # whatever a user's module raises
                failures[mode] = f"{type(error).__name__}: {first_line(error)}"
    if not run.counts:
        raise ValueError(f"the module does not run on its inputs: {failures[EVALUATION]}")
    run.notes += [f"it does not run in {mode}: {failure}" for mode, failure in failures.items()]
    run.calls = _merge(seen)
    return run


def _watch(run: Run, model: nn.Module, inputs: object, mode: str) -> tuple[Counter[str], list[Seen]]:
    """Run twice, with torch's functions watched and without; return the calls and what was normalised."""
    copied = _prepared(model, mode)
    watch = _Watch(_paths(copied))
    functions = FunctionWatch(lambda: watch.place)
    operations = OperationWatch(lambda: watch.place, functions)
    with watch.watching(), _gradients(mode), operations, functions:
        _call(copied, inputs)
    # What overrides functions keeps torch's fused encoder layers from being used: they run in this pass only.
    copied = _prepared(model, mode)
    plain = _Watch(_paths(copied))
    fused = OperationWatch(lambda: plain.place)
    with plain.watching(), _gradients(mode), fused:
        _call(copied, inputs)
    for path, shapes in (*watch.shapes.items(), *plain.shapes.items()):
        run.shapes[path] = tuple(dict.fromkeys([*run.shapes.get(path, ()), *shapes]))
    layers = [one for one in fused.seen if one.family == "encoder layer"]
    seen = [
        one
        for one in (*functions.seen, *operations.seen, *operations.written)
        if not any(one.path == layer.path or one.path.startswith(f"{layer.path}.") for layer in layers)
    ]
    return plain.counts, [*seen, *layers]


def _paths(model: nn.Module) -> dict[int, str]:
    return {id(module): path for path, module in model.named_modules()}


def _gradients(mode: str) -> AbstractContextManager[Any]:
    return nullcontext() if mode == TRAINING else torch.no_grad()


def _prepared(model: nn.Module, mode: str) -> nn.Module:
    """Return a copy to be run, uncompiled: what is compiled shows no calls of its submodules."""
    try:
        copied = copy.deepcopy(model).train(mode == TRAINING)
    except (Exception, SystemExit) as error:
        raise _NoCopy(f"{type(error).__name__}: {first_line(error)}") from error
    for part in copied.modules():
        part._compiled_call_impl = None
    return copied


def _call(model: nn.Module, inputs: object) -> None:
    positions, keywords = arguments(_fresh(inputs))
    model(*positions, **keywords)


def _fresh(inputs: Any) -> Any:
    """Return a copy of the inputs, so that no run sees what another one wrote into them."""
    if isinstance(inputs, Tensor):
        return inputs.detach().clone().requires_grad_(inputs.requires_grad)
    if isinstance(inputs, Mapping):
        return {key: _fresh(value) for key, value in inputs.items()}
    if type(inputs) in (tuple, list):
        return type(inputs)(_fresh(value) for value in inputs)
    return inputs


def _merge(seen: Mapping[str, list[Seen]]) -> list[Call]:
    """Draw equal normalisations of one submodule together, over modes and calls."""
    merged: dict[Seen, dict[str, int]] = {}
    for mode, found in seen.items():
        for one in found:
            counts = merged.setdefault(one, {})
            counts[mode] = counts.get(mode, 0) + 1
    return [
        Call(
            **{key: value for key, value in dataclasses.asdict(one).items() if key != "family"},
            modes=tuple(counts),
            count=max(counts.values()),
        )
        for one, counts in merged.items()
    ]
