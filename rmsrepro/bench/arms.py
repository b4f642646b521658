"""Which arms a bench has, and the step that each of them does."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from rmsrepro.config.errors import UserError
from rmsrepro.config.resolve import resolve
from rmsrepro.config.schema import Backend, TrainConfig
from rmsrepro.data import build_data
from rmsrepro.norms import BackendUnavailable, NormSpec, resolve_backend
from rmsrepro.norms.given import check_task
from rmsrepro.runs.execution import tokenizer_cache
from rmsrepro.runs.seeding import seed_dropout
from rmsrepro.tasks import Task, build_optimizer, build_task

BASELINE = "layernorm"


@dataclass(frozen=True)
class Arm:
    """One norm on one backend. The baseline is built and timed as two independent twins."""

    label: str
    """`norm/backend`, with the parameters where two arms would otherwise have the same label."""
    norm: str
    params: dict[str, Any]
    backend: str
    is_baseline: bool = False
    unavailable: str | None = None
    """Why this backend cannot do it, or this task not have it."""

    @property
    def twins(self) -> list[str]:
        """The names under which it is sampled."""
        return [f"{self.label}#1", f"{self.label}#2"] if self.is_baseline else [self.label]


def arrange_arms(norms: Iterable[Mapping[str, Any]], task: str | None = None) -> tuple[list[Arm], list[str]]:
    """Return the arms for `norms` ({"name", "params", "backend"}), baselines first, and notes.

    A norm that a backend does not have, or that does not suit the `task`, is an arm that is unavailable.

    Every backend gets a baseline of its own: the first layernorm asked for with it, else one that is
    added. `auto` becomes the fastest backend that all arms asking for `auto`, and layernorm, have.

    Raises:
        UserError, ValueError, TypeError: an unknown norm, or wrong parameters.
    """
    asked = [(str(norm["name"]), dict(norm.get("params") or {}), str(norm["backend"])) for norm in norms]
    notes: list[str] = []
    automatic = [NormSpec(name, params) for name, params, backend in asked if backend == "auto"]
    if automatic:
        chosen = resolve_backend([NormSpec(BASELINE), *automatic], "auto")
        notes.append(f"backend=auto is {chosen}: the fastest that all arms have")
        asked = [(name, params, chosen if backend == "auto" else backend) for name, params, backend in asked]
    arms: list[Arm] = []
    for backend in dict.fromkeys(backend for _, _, backend in asked):
        own = [(name, params) for name, params, used in asked if used == backend]
        if all(name != BASELINE for name, _ in own):
            notes.append(f"{BASELINE}/{backend} was added: it is the baseline")
            own.insert(0, (BASELINE, {}))
        unique = [norm for place, norm in enumerate(own) if norm not in own[:place]]
        baseline = next(norm for norm in unique if norm[0] == BASELINE)
        repeated = Counter(name for name, _ in unique)
        for norm in [baseline, *(norm for norm in unique if norm is not baseline)]:
            name, params = norm
            given = ",".join(f"{key}={value}" for key, value in sorted(params.items()))
            label = f"{name}({given})" if repeated[name] > 1 and given else name
            arms.append(
                Arm(
                    label=f"{label}/{backend}",
                    norm=name,
                    params=params,
                    backend=backend,
                    is_baseline=norm is baseline,
                    unavailable=_why_unavailable(name, params, backend, task),
                )
            )
    return arms, notes


def _why_unavailable(name: str, params: Mapping[str, Any], backend: str, task: str | None) -> str | None:
    try:
        resolve_backend([NormSpec(name, params)], backend)
        if task is not None:
            check_task(name, task)
    except (BackendUnavailable, UserError) as error:
        return str(error)
    return None


def check_base(base: TrainConfig) -> None:
    """Raise UserError where the config leaves no place for a norm: all arms would be the same."""
    if (base.model.name == "gru" and not base.sites) or (
        base.model.name != "gru" and base.placement.value == "none"
    ):
        raise UserError(
            f"model={base.model.name} with placement={base.placement.value} and "
            f"{len(base.sites)} sites has no norm in it, so there is nothing to compare; "
            "set placement (Transformer) or sites (GRU)"
        )


def arm_config(base: TrainConfig, arm: Arm) -> TrainConfig:
    """The training config of `arm`: `base` with its norm and backend."""
    return resolve(replace(base, norm={"name": arm.norm, **arm.params}, backend=Backend(arm.backend)))


@dataclass
class PreparedData:
    """The batches of the timed steps, and what building a task needs to know about the data."""

    batches: list[Any]
    src_vocab: int
    tgt_vocab: int
    shape: str
    """Of the first batch, as text."""

    def bytes_per_token(self, split: str) -> float:
        """Unknown here: a timing reports no quality."""
        return math.nan


def prepare_data(base: TrainConfig, num_batches: int) -> PreparedData:
    """Draw real training batches for `num_batches` updates."""
    accumulate = base.trainer.accumulate
    cache = tokenizer_cache(base)
    data = build_data(base.data, base.task.name, seed=base.seed, accumulate=accumulate, cache_dir=cache)
    batches = list(islice(iter(data.train_dataloader()), num_batches * accumulate))
    return PreparedData(
        batches=batches,
        src_vocab=data.src_vocab,
        tgt_vocab=data.tgt_vocab,
        shape=_shape(batches[0]),
    )


def _shape(batch: Any) -> str:
    if hasattr(batch, "inputs"):
        return "x".join(str(size) for size in batch.inputs.shape)
    source, target = batch.src.shape, batch.tgt_in.shape
    return f"{source[0]}x{source[1]}->{target[1]}"


class TrainingStep:
    """One optimiser update, as a bare loop: what training does in a step, without a framework.

    batch -> forward -> loss -> backward (over the accumulated batches) -> clip -> optimiser ->
    schedule. The batches lie on the device already and are used in turn, over and over.
    """

    def __init__(self, config: TrainConfig, data: PreparedData, device: torch.device) -> None:
        self._task: Task = build_task(config, data)
        self._task.to(device)
        self._task.train()
        self._optimizer, self._schedule = build_optimizer(
            self._task.model, config.optim, config.trainer.max_steps
        )
        self._batches: Sequence[Any] = [batch.to(device) for batch in data.batches]
        self._accumulate = config.trainer.accumulate
        self._device_type = device.type
        self._mixed = config.precision == "bf16-mixed"
        self._seed = config.seed
        self._next = 0

    def __call__(self) -> None:
        accumulate = self._accumulate
        for number in range(accumulate):
            batch = self._batches[self._next]
            self._next = (self._next + 1) % len(self._batches)
            with torch.autocast(self._device_type, dtype=torch.bfloat16, enabled=self._mixed):
                loss = self._task.training_step(batch, number)
            (loss / accumulate if accumulate > 1 else loss).backward()
        self._task.configure_gradient_clipping(self._optimizer)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad(set_to_none=True)

    def seed(self) -> None:
        """Start dropout from the run's seed, so that the first losses of all arms are comparable."""
        seed_dropout(self._seed)

    def loss(self) -> float:
        """Training loss of the last batch, in nats a token. Waits for the device."""
        last: Tensor | None = self._task.last_loss
        return math.nan if last is None else float(last)

    def tidy(self) -> None:
        """Forget what the task collects for its records. Outside the clock."""
        self._task.pop_training_metrics()
