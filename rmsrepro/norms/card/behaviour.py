"""Checks of a module: empty batches, views, the caller's memory, the compiler, saving and copying."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rmsrepro.norms.card.drawing import EPS, NAMES, normal, rows_of
from rmsrepro.norms.card.numerics import distances, run
from rmsrepro.norms.card.result import Check, Findings, judged
from rmsrepro.norms.card.subject import Subject, enliven, learned

# -------------------------------------------------------------------------------------------- shapes


def empty_batch(subject: Subject) -> Check:
    """A batch without rows: its shape, and gradients of zeros."""
    module = subject.lively()
    x = torch.zeros(0, 5, subject.dim, requires_grad=True)
    y = module(x)
    findings = Findings()
    findings.expect(y.shape == x.shape, f"the shape (0, 5, {subject.dim}) becomes {tuple(y.shape)}")
    y.sum().backward()
    found = {"x": x, **learned(module)}
    for name, leaf in found.items():
        if leaf.grad is None:
            findings.expect(False, f"{name} gets no gradient")
        else:
            findings.expect(bool((leaf.grad == 0).all()), f"the gradient of {name} is not zero")
    findings.expect(_still_finite(module), "it leaves numbers behind that are not finite")
    return findings.check(
        "keeps the shape; gradients are zeros", {"shape": list(y.shape)}, [0, 5, subject.dim]
    )


def _still_finite(module: nn.Module) -> bool:
    return all(bool(one.isfinite().all()) for one in module.state_dict().values() if isinstance(one, Tensor))


def non_contiguous(subject: Subject) -> Check:
    """Views with gaps, or with their dimensions exchanged, give what their contiguous copies give."""
    findings, measured = Findings(), {}
    allowed = 16 * EPS[torch.float32]
    rows, dim = subject.sheet(6)
    views = {
        "transposed": rows_of(dim, rows).float().t(),
        "every_other_column": rows_of(rows, 2 * dim).float()[:, ::2],
        "expanded": rows_of(1, dim).float().expand(rows, dim),
    }
    if not subject.of_weights:
        views["permuted"] = rows_of(3, dim, rows).float().permute(2, 0, 1)
    for name, x in views.items():
        upstream = normal(*x.shape, number=9).float()
        mine, copied = (
            run(enliven(subject.direct()), one, upstream)
            for one in (x, x.clone(memory_format=torch.contiguous_format))
        )
        off = max(distances(mine, copied, x, upstream).values())
        measured[name] = off
        findings.expect(
            off <= allowed, f"a view ({name.replace('_', ' ')}) differs from its copy by {off:.2g}"
        )
    return findings.check("views give what their contiguous copies give", measured, allowed)


# -------------------------------------------------------------------------------------------- memory


def in_place(subject: Subject) -> Check:
    """The input and the parameters are the same bits after a call as before."""
    overwritten: dict[str, list[str]] = {}
    for mode in ("training", "evaluation"):
        for dtype in EPS:
            if subject.of_weights and dtype is not torch.float32:
                continue
            module = subject.lively().train(mode == "training")
            x = normal(3, 4, subject.dim).to(dtype)
            kept = {"the input": x.clone()} | {
                name: one.detach().clone() for name, one in module.named_parameters()
            }
            try:
                with contextlib.nullcontext() if mode == "training" else torch.no_grad():
                    module(x)
            except Exception:
                if dtype is torch.float32:
                    raise
                continue  # the rule on dtypes says so
            for name, now in {"the input": x, **dict(module.named_parameters())}.items():
                if not torch.equal(now, kept[name]):
                    overwritten.setdefault(f"{name} is overwritten in {mode}", []).append(NAMES[dtype])
    told = "; ".join(f"{what} ({', '.join(dtypes)})" for what, dtypes in overwritten.items())
    fine = "the input is left alone, in training and evaluation"
    return judged(not overwritten, told or fine, overwritten, "equal bits")


# --------------------------------------------------------------------------------------- the compiler


def compiles(subject: Subject) -> Check:
    """torch.compile takes the module as one graph; forward and backward (no code is generated)."""
    findings = Findings()
    x, upstream = rows_of(4, subject.dim).float(), normal(4, subject.dim, number=9).float()
    with _quiet():
        explained = torch._dynamo.explain(subject.lively())(x)
        breaks = max(0, explained.graph_break_count)  # it counts the graphs, less one
        reasons = [str(one.reason).splitlines()[0] for one in explained.break_reasons]
        why = f" ({reasons[0]})" if reasons else ""
        findings.expect(breaks == 0, f"{breaks} graph breaks{why}")
        off = None
        if breaks == 0:
            torch._dynamo.reset()
            compiled: Any = torch.compile(subject.lively(), backend="aot_eager", fullgraph=True)
            got, expected = run(compiled, x, upstream), run(subject.lively(), x, upstream)
            off = max(distances(got, expected, x, upstream).values())
            findings.expect(off <= 1e-5, f"compiled, it differs by {off:.2g}")
    measured = {"graph_breaks": breaks, "difference": off}
    return findings.check(
        "torch.compile takes it as one graph", measured, {"graph_breaks": 0, "difference": 1e-5}
    )


def exports(subject: Subject) -> Check:
    """torch.export takes the module in evaluation mode, and the exported program gives the same."""
    module, x = subject.lively().eval(), normal(4, subject.dim).float()
    findings, rows = Findings(), torch.export.Dim("rows", min=2)
    with _quiet(), torch.no_grad():
        try:
            program = torch.export.export(module, (x,), dynamic_shapes=({0: rows},))
            any_rows = True
        except Exception:
            program = torch.export.export(module, (x,))
            any_rows = False
        batches = [x, normal(7, subject.dim, number=1).float()] if any_rows else [x]
        off = max(float((program.module()(one.clone()) - module(one.clone())).abs().max()) for one in batches)
    findings.expect(off <= 1e-5, f"exported, it differs by {off:.2g}")
    fine = (
        "torch.export takes it, for any number of rows"
        if any_rows
        else "torch.export takes it, for fixed shapes"
    )
    return findings.check(fine, {"any_number_of_rows": any_rows, "difference": off}, {"difference": 1e-5})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the compiler's own log and warnings out of the card."""
    loggers = [logging.getLogger(name) for name in ("torch._dynamo", "torch.export", "torch._export")]
    levels = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch._dynamo.reset()
            yield
    finally:
        torch._dynamo.reset()
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)


# --------------------------------------------------------------------------------- saving and copying


def state_dict_round_trip(subject: Subject) -> Check:
    """Saved, and loaded into a fresh module, it gives the same bits in both modes."""
    module = _used(subject)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    fresh = subject.build()
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    return _same(subject, module, {"a fresh module with its state_dict": fresh}, "saved and loaded")


def copies(subject: Subject) -> Check:
    """A deepcopy and a pickled copy give a module with the same bits."""
    module = _used(subject)
    twins = {"its deepcopy": copy.deepcopy(module), "its pickle": pickle.loads(pickle.dumps(module))}
    return _same(subject, module, twins, "deepcopied and pickled")


def _used(subject: Subject) -> nn.Module:
    """A module whose parameters, and whatever it remembers of its inputs, are not the initial ones."""
    module = subject.lively().train()
    for number in range(2):
        run(module, normal(5, subject.dim, number=number).float() + 1, torch.ones(5, subject.dim))
    return module


def _same(subject: Subject, module: nn.Module, twins: dict[str, nn.Module], what: str) -> Check:
    findings, x = Findings(), normal(5, subject.dim, number=2).float()
    # Evaluation first: a call in training may move running statistics.
    for mode in (False, True):
        for name, twin in twins.items():
            with torch.no_grad():
                mine = copy.deepcopy(module).train(mode)(x.clone())
                theirs = twin.train(mode)(x.clone())
            label = "training" if mode else "evaluation"
            findings.expect(torch.equal(mine, theirs), f"{name} gives other values in {label} mode")
    return findings.check(f"{what}, it gives the same bits", bound="equal bits")
