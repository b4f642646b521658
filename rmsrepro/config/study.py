"""What a study fixes before anything runs: its grid, its rules and its margins (`conf/study/*.yaml`).

A *cell* is one model on one task, written `model/task`. A study compares every norm with its
baseline inside each cell. The classes are structured configs: no tuples, no `Literal`, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import yaml

HIGHER_IS_BETTER = ("bleu", "chrf", "accuracy")
"""A metric whose name holds one of these words is better when higher; every other, when lower."""


def higher_is_better(metric: str) -> bool:
    """Whether a larger value of `metric` (`val_loss`, `test_bleu`, ...) is the better one."""
    return any(word in metric.lower() for word in HIGHER_IS_BETTER)


def cell_name(model: str, task: str) -> str:
    """Return the name of a cell, `model/task`, the key of a study's per-cell settings."""
    return f"{model}/{task}"


def parameter_value(text: str) -> Any:
    """What an override's text stands for: YAML, and numbers like 1e-5, which YAML takes for a text."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


class Relation(Enum):
    """What a study's measurement is to a claim of the paper."""

    faithful = "faithful"
    """The paper's model, size class and data (for a time, its hardware too): it can reproduce the claim."""
    proxy = "proxy"
    """Another size, data or hardware: it can show the claim's direction at best."""


@dataclass
class StudyBench:
    """One paired timing, or one a cell, that belongs to a study."""

    name: str = ""
    """For messages; empty: the level."""
    level: str = "step"
    """A choice of `bench`: layer, model or step."""
    cells: list[str] = field(default_factory=list)
    """Cells (`model/task`) that are timed, one after another; a layer has none."""
    norms: list[str] = field(default_factory=list)
    """Of the study's norms those that are timed; empty: all that the cell has."""
    backends: list[str] = field(default_factory=list)
    """Empty: the study's backend."""
    overrides: list[str] = field(default_factory=list)
    """Overrides of `rmsrepro bench`, the budget among them."""

    @property
    def title(self) -> str:
        """The name, else the level."""
        return self.name or self.level


@dataclass
class ClaimTest:
    """What of a study's records speaks of a claim. Empty fields are taken from the study and the claim."""

    cell: str = ""
    """The cell, `model/task`, whose runs or timings are looked at."""
    norm: str = ""
    """The study's norm; empty: the one that the claim names."""
    level: str = "model"
    """For times: the level of the timing."""
    backend: str = ""
    """For times: the backend of norm and baseline; empty: the study's."""


@dataclass
class StudyClaims:
    """Claims of the paper that a study addresses, all in one way."""

    claims: list[str] = field(default_factory=list)
    """Ids of claims; `*` stands for any text, as in `t2-*-time`."""
    relation: Relation = Relation.proxy
    """faithful or proxy."""
    by: ClaimTest = field(default_factory=ClaimTest)
    """What is looked at."""
    why: str = ""
    """In a sentence, what makes it faithful, or what makes it a proxy."""


@dataclass
class StudyJobs:
    """How a study's training runs are spread over the machine."""

    n_jobs: int = 1
    """Workers at the same time."""
    num_threads: int | None = 1
    """Threads of torch in each worker; None: torch's choice."""


@dataclass
class StudyConfig:
    """Grid, seeds, metrics, margins and thresholds of a study, fixed before it runs."""

    name: str = "???"
    """The file's name; runs carry it as `study`."""
    title: str = ""
    """One line for headings; empty: the name."""
    description: str = ""
    """What the study asks and what its sizes mean, in a sentence or two."""
    norms: list[str] = field(default_factory=list)
    """Names, import strings or files of conf/norm, the baseline among them."""
    models: list[str] = field(default_factory=list)
    """Names of conf/model."""
    tasks: list[str] = field(default_factory=list)
    """Names of conf/task."""
    seeds: list[int] = field(default_factory=list)
    """Every norm runs with each of them: the pairs of the comparison."""
    backend: str = "composite"
    """One backend for all arms of the study."""
    baseline: str = "layernorm"
    """The norm that every other is compared with."""
    primary: dict[str, str] = field(default_factory=dict)
    """Task -> the metric, at the last step, that decides the verdict."""
    secondary: dict[str, list[str]] = field(default_factory=dict)
    """Task -> further metrics, shown without a verdict."""
    margin: dict[str, float] = field(default_factory=dict)
    """Metric -> the largest absolute difference that still counts as the same, in the metric's unit."""
    learned: dict[str, float] = field(default_factory=dict)
    """Cell -> the value of the primary metric that the baseline's mean must reach to count as trained."""
    target: dict[str, float] = field(default_factory=dict)
    """Cell -> the value of `target_metric` that time-to-target waits for; it stops no run."""
    target_metric: str = "val_loss"
    """The validation metric that `target` speaks of."""
    overrides: list[str] = field(default_factory=list)
    """Overrides of `rmsrepro train` for all runs."""
    task_overrides: dict[str, list[str]] = field(default_factory=dict)
    """Task -> further overrides, such as its data."""
    cell_overrides: dict[str, list[str]] = field(default_factory=dict)
    """Cell -> further overrides."""
    norm_overrides: dict[str, list[str]] = field(default_factory=dict)
    """Norm -> further overrides, such as `norm.p=0.25`."""
    norm_variants: dict[str, Any] = field(default_factory=dict)
    """One of `norms` -> another norm's name and parameters, such as `{name: prmsnorm, p: 0.5}`: by it a norm
    can be there twice."""
    norm_cells: dict[str, list[str]] = field(default_factory=dict)
    """Norm -> the only cells that it runs in; a norm that is not named runs in all."""
    bench: StudyBench = field(default_factory=StudyBench)
    """Which cells are timed, and how, where that is one timing a cell."""
    benches: list[StudyBench] = field(default_factory=list)
    """Further timings, at several levels."""
    claims: list[StudyClaims] = field(default_factory=list)
    """Which claims of the paper it addresses; the ledger is in docs/claims.md."""
    norm_files: dict[str, Any] = field(default_factory=dict)
    """Norm -> what its file says, for norms that are files of the user's conf/norm. Filled when the study is
    read: their runs are recorded under the name in the file."""
    verdict: bool = True
    """False: the report shows numbers and gives no verdict."""
    jobs: StudyJobs = field(default_factory=StudyJobs)
    """How the runs are spread over the machine."""

    def norm_of(self, norm: str) -> tuple[str, dict[str, Any]]:
        """Return the name that runs of one of `norms` are recorded under, and the parameters it is given."""
        content = dict(self.norm_variants.get(norm) or self.norm_files.get(norm, {}))
        name = str(content.pop("name", norm))
        for override in self.norm_overrides.get(norm, []):
            key, _, value = override.partition("=")
            if key.startswith("norm."):
                content[key.removeprefix("norm.")] = parameter_value(value)
        return name, content

    def cells(self) -> list[str]:
        """All cells, models outside, tasks inside, in the order of the lists."""
        return [cell_name(model, task) for model in self.models for task in self.tasks]

    def norms_of(self, cell: str) -> list[str]:
        """The norms that run in a cell."""
        return [norm for norm in self.norms if cell in self.norm_cells.get(norm, [cell])]

    def timings(self) -> list[StudyBench]:
        """All timings: `bench`, if it names cells, and `benches`."""
        return [*([self.bench] if self.bench.cells else []), *self.benches]

    def primary_metric(self, task: str) -> str:
        """The metric that decides for `task`: `primary[task]`, else `val_loss`."""
        return self.primary.get(task, "val_loss")
