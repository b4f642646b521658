"""Sorts runs into cells and arms: which runs may be compared, seed by seed.

A cell holds runs that differ in nothing but the norm and the seed. With a study a cell also knows
the arms and seeds that were planned, so that a missing run is seen.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rmsrepro.config.later import is_as_before
from rmsrepro.config.study import StudyConfig, cell_name
from rmsrepro.norms import norm_info
from rmsrepro.norms.params import same_value
from rmsrepro.norms.settings import whole
from rmsrepro.report.formatting import NORM_TITLES, norm_title
from rmsrepro.report.labels import differences
from rmsrepro.report.parameters import Names, key_of, names_of, settings_of, value_text
from rmsrepro.report.records import RunRecord, State

BASELINE = "layernorm"

NOT_COMPARED = frozenset(
    {
        *(
            "norm",
            "seed",
            "out_dir",
            "study",
            "study_name",
            "experiment",
            "tracker",
            "plugins",
            "rerun",
            "ckpt",
        ),
        *("sweep", "backend", "placement", "sites", "data.cache_dir"),
        *("trainer.progress", "trainer.log_every", "trainer.checkpoint_every", "trainer.val_every"),
        *("trainer.num_threads", "trainer.accelerator"),
    }
)
"""Settings that may differ inside a cell, or that the key of a cell holds in another form."""

DATA_FILES = frozenset(
    {
        *("data.path", "data.train", "data.val", "data.test"),
        *(
            "data.train_src",
            "data.train_tgt",
            "data.val_src",
            "data.val_tgt",
            "data.test_src",
            "data.test_tgt",
        ),
    }
)
"""Where data lies; once its content hash is known, the place says nothing."""


@dataclass(frozen=True)
class Arm:
    """One norm (with its parameters) in a cell."""

    norm: str
    label: str
    """The norm's title, with the parameters that tell it from other settings of the norm on the page."""
    params: Mapping[str, Any]
    """All parameters; of a norm that is not to be had here, those that are known."""
    runs: Mapping[int, RunRecord]
    """Seed -> its run; of several runs of a seed, the one that counts (see `_best`)."""


@dataclass(frozen=True)
class Cell:
    """Runs that differ only in norm and seed."""

    model: str
    task: str
    label: str
    """`model / task`, with what tells this cell from others of the same name."""
    backend: str
    settings: Mapping[str, Any]
    """The flat settings that all runs of the cell share."""
    arms: tuple[Arm, ...]
    baseline: str
    seeds: tuple[int, ...]
    """Seeds that every arm should have: the study's, else those seen."""

    @property
    def name(self) -> str:
        """`model/task`, as a study's per-cell settings are keyed."""
        return cell_name(self.model, self.task)

    def baseline_of(self, arm: Arm) -> Arm | None:
        """The baseline arm that shares most parameters with `arm`, then the one with most runs."""
        candidates = [other for other in self.arms if other.norm == self.baseline]
        if not candidates:
            return None

        def shared(other: Arm) -> tuple[int, int]:
            same = sum(1 for key, value in other.params.items() if arm.params.get(key) == value)
            return same, len(other.runs)

        return max(candidates, key=shared)


def build_cells(
    runs: Iterable[RunRecord], study: StudyConfig | None, names: Names | None = None
) -> tuple[list[Cell], list[RunRecord]]:
    """Return the cells, and the runs that are in none of them.

    Without a study every run that names model, task and seed is in a cell. With one there is one
    cell for each planned model and task, empty if nothing ran; of several groups of runs with
    different settings, the one with the most finished runs stands for it, then the newest.

    Args:
        names: the labels of norms, where the page shows more than these runs.
    """
    usable = [run for run in runs if run.model and run.task and run.norm and run.seed is not None]
    groups = _groups(usable, _loose_keys(study))
    if study is None:
        names = names_of(usable) if names is None else names
        cells = label_apart([_cell(group, None, names) for group in groups])
        return cells, [run for run in runs if run not in usable]
    cells = []
    placed: set[int] = set()
    for model in study.models:
        for task in study.tasks:
            rivals = [group for group in groups if (group[0].model, group[0].task) == (model, task)]
            best = max(rivals, key=_weight) if rivals else []
            cell = _planned_cell(model, task, best, study)
            placed.update(id(run) for arm in cell.arms for run in arm.runs.values())
            cells.append(cell)
    return cells, [run for run in runs if id(run) not in placed]


def flatten(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted keys; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in node.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten({str(k): v for k, v in value.items()}, f"{name}."))
        else:
            flat[name] = value
    return flat


def _loose_keys(study: StudyConfig | None) -> frozenset[str]:
    """Settings that a study varies by norm, on purpose: its arms are still one cell."""
    if study is None:
        return frozenset()
    overrides = (override for group in study.norm_overrides.values() for override in group)
    return frozenset(override.split("=", 1)[0].lstrip("+~") for override in overrides)


def _settings(run: RunRecord, loose: frozenset[str]) -> dict[str, Any]:
    """The settings of a run that its partner in a pair must share, apart from what a norm decides."""
    flat = flatten(run.config)
    kept = {
        key: value
        for key, value in flat.items()
        if not {key, key.split(".")[0]} & NOT_COMPARED
        and key not in loose
        and not is_as_before(key, value)
        and not (run.fingerprint and key in DATA_FILES)
    }
    kept |= {"model": run.model, "task": run.task, "data": run.data, "precision": run.precision}
    if run.fingerprint:
        kept["data content"] = run.fingerprint
    if run.parent:
        kept["continued"] = True
    return kept


def settings_shared(run: RunRecord, loose: Iterable[str] = ()) -> dict[str, Any]:
    """The settings of a run that its whole cell shares, without those that are `loose`."""
    return _settings(run, frozenset(loose)) | _norm_settings(run)


def _norm_settings(run: RunRecord) -> dict[str, Any]:
    """The settings of a run that say how and where it is normalised, as far as they mean anything to it.

    None of them means anything without a norm, and the placement nothing to a norm of weights: such a run
    may join any cell that the others leave open.
    """
    if run.norm == "none":
        return {}
    settings = {"backend": run.backend, "sites": run.config.get("sites")}
    return settings if _is_of_weights(run.norm) else settings | {"placement": run.placement}


def _is_of_weights(norm: str) -> bool:
    try:
        return norm_info(norm).scope == "weight"
    except (ValueError, TypeError, ImportError):  # a plug-in that is not to be had here
        return False


def _groups(runs: Sequence[RunRecord], loose: frozenset[str]) -> list[list[RunRecord]]:
    by_core: dict[str, list[RunRecord]] = defaultdict(list)
    for run in runs:
        by_core[json.dumps(_settings(run, loose), sort_keys=True, default=str)].append(run)
    groups = []
    for members in by_core.values():
        placed: dict[str, list[RunRecord]] = defaultdict(list)
        for run in members:
            placed[json.dumps(_norm_settings(run), sort_keys=True, default=str)].append(run)
        # A group whose settings are a part of another's joins it; what joins none stands alone.
        joining = {
            one: [other for other in placed if json.loads(one).items() < json.loads(other).items()]
            for one in placed
        }
        for key, group in placed.items():
            if not joining[key]:
                guests = [run for one, hosts in joining.items() if key in hosts for run in placed[one]]
                groups.append(group + guests)
    return sorted(groups, key=lambda group: (group[0].model, group[0].task, -len(group)))


def _weight(group: Sequence[RunRecord]) -> tuple[int, float]:
    return sum(run.finished for run in group), max(run.written for run in group)


def _arms(group: Sequence[RunRecord], order: Sequence[str], names: Names) -> list[Arm]:
    variants: dict[tuple[str, str], list[RunRecord]] = defaultdict(list)
    for run in group:
        variants[run.norm, key_of(settings_of(run))].append(run)
    arms = []
    for (norm, _), runs in variants.items():
        params = settings_of(runs[0])
        by_seed: dict[int, list[RunRecord]] = defaultdict(list)
        for run in runs:
            if run.seed is not None:
                by_seed[run.seed].append(run)
        chosen = {seed: max(same, key=_best) for seed, same in sorted(by_seed.items())}
        arms.append(Arm(norm=norm, label=names.title(norm, params), params=params, runs=chosen))
    places = {name: place for place, name in enumerate(order)}
    return sorted(arms, key=lambda arm: (places.get(arm.norm, len(places)), arm.label))


def _best(run: RunRecord) -> tuple[bool, float]:
    """Of several runs of one seed an ended one counts before others, then the newest."""
    return run.state in (State.completed, State.diverged), run.written


_ORDER = (*(norm for norm in NORM_TITLES if norm != "none"), "none")


def _cell(group: Sequence[RunRecord], study: StudyConfig | None, names: Names) -> Cell:
    arms = _arms(group, study.norms if study else _ORDER, names)
    first = next((run for run in group if run.norm != "none"), group[0])
    loose = _loose_keys(study)
    return Cell(
        model=first.model,
        task=first.task,
        label=f"{first.model} / {first.task}",
        backend=study.backend if study and study.backend != "auto" else first.backend,
        settings=settings_shared(first, loose),
        arms=tuple(arms),
        baseline=study.baseline if study else BASELINE,
        seeds=tuple(study.seeds) if study else tuple(sorted({seed for arm in arms for seed in arm.runs})),
    )


def _planned_cell(model: str, task: str, group: Sequence[RunRecord], study: StudyConfig) -> Cell:
    """A study's cell: exactly its norms, one arm each, and its seeds."""
    found = _cell(group, study, Names(())) if group else None
    arms: dict[str, Arm] = {}
    taken: list[Arm | None] = []
    settings: list[dict[str, Any]] = []
    names = study.norms_of(cell_name(model, task))
    # Who is given most parameters chooses first: of two settings of one norm each gets its own.
    for norm in sorted(names, key=lambda norm: -len(study.norm_of(norm)[1])):
        name, given = study.norm_of(norm)
        variants = [arm for arm in found.arms if arm.norm == name] if found else []
        if sum(study.norm_of(other)[0] == name for other in names) > 1:
            # The runs of one setting never stand for another's that has none.
            others = [arm for arm, theirs in zip(taken, settings, strict=True) if theirs != given]
            variants = [arm for arm in variants if arm not in others and _has(arm, given)]
        free = [arm for arm in variants if arm not in taken]
        kept = max(free or variants, key=lambda arm: _fits(arm, given), default=None)
        taken.append(kept)
        settings.append(given)
        chosen = {seed: run for seed, run in kept.runs.items() if seed in study.seeds} if kept else {}
        params = kept.params if kept else given
        arms[norm] = Arm(norm=name, label=_label(norm, study), params=params, runs=chosen)
    return Cell(
        model=model,
        task=task,
        label=f"{model} / {task}",
        backend=found.backend if found and study.backend == "auto" else study.backend,
        settings=found.settings if found else {},
        arms=tuple(arms[norm] for norm in names),
        baseline=study.baseline,
        seeds=tuple(study.seeds),
    )


def _label(norm: str, study: StudyConfig) -> str:
    """The title of one of a study's norms; of a variant that of its norm, with its parameters."""
    if norm not in study.norm_variants:
        return norm_title(norm)
    name, given = study.norm_of(norm)
    return f"{norm_title(name)} ({', '.join(f'{key}={value_text(value)}' for key, value in given.items())})"


def _has(arm: Arm, given: Mapping[str, Any]) -> bool:
    """Whether an arm is its norm with these parameters; of one that is not to be had, as far as it says."""
    return all(same_value(arm.params.get(key), value) for key, value in whole(arm.norm, given).items())


def _fits(arm: Arm, given: Mapping[str, Any]) -> tuple[int, int, float]:
    """How well an arm is the one that was given these parameters; of equals the one that has more runs."""
    return sum(same_value(arm.params.get(key), value) for key, value in given.items()), *_weight(
        list(arm.runs.values())
    )


def label_apart(cells: list[Cell]) -> list[Cell]:
    """Add to equal labels what tells their cells apart."""
    by_label: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_label[cell.label].append(cell)
    labelled = []
    for cell in cells:
        words = differences(cell.settings, [other.settings for other in by_label[cell.label]])
        labelled.append(replace(cell, label=f"{cell.label} ({words})") if words else cell)
    return labelled
