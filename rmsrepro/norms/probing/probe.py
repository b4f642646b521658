"""Probe one module with inputs: is it a norm, and which."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rmsrepro.norms.probing import halves
from rmsrepro.norms.probing.affine import (
    LARGE,
    TOLERANCE,
    Part,
    Role,
    draw_values,
    find_parts,
    neutralise,
    odd_even,
)
from rmsrepro.norms.probing.core import FEWEST_ENTRIES, POSITIONS, ROWS, FoundCore, find_core, random_rows
from rmsrepro.norms.probing.dimensions import dimensions_read
from rmsrepro.norms.probing.finding import Eps, EpsPosition, Finding, Gain, Kind, NotANorm, Over
from rmsrepro.norms.probing.rows import entries_read, name_statistic
from rmsrepro.norms.probing.smallness import fit_eps
from rmsrepro.norms.probing.subject import (
    LAYOUTS,
    POSITION_LAYOUTS,
    Layout,
    NotCallable,
    Subject,
    undisturbed,
)


def probe(
    module: nn.Module,
    width: int | Sequence[int],
    *,
    channels_first: bool = False,
    shapes: Sequence[tuple[int, ...]] = (),
) -> Finding | NotANorm:
    """Probe a copy of `module` with rows of `width` entries; the module itself is left as it is.

    A module is a norm when its output, gain and bias taken out, does not change with the scale of its input
    and is that input, its mean subtracted or not, times one number a row. It is called in float64, or in
    float32 if it refuses that, in evaluation mode; where it is no norm there, in training mode too, with
    statistics over the other rows.

    Args:
        module: any module; nothing is concluded from its class or its parameters' names.
        width: entries of a row, or the shape of a row of several dimensions.
        channels_first: hand the rows over as the positions of one sample (1, width, rows) first, as
            InstanceNorm wants them, and as (rows, width) where it is no norm of those.
        shapes: of inputs that the module was called with. On inputs of these numbers of dimensions, or else
            on one of three, it is looked whether the statistic is one of the last dimension.

    Returns:
        What it does, or why it is no norm.
    """
    shape = (width,) if isinstance(width, int) else tuple(width)
    with undisturbed():
        found = _probe(module, shape, POSITION_LAYOUTS) if channels_first else NotANorm("")
        if isinstance(found, NotANorm):
            found = _probe(module, shape, LAYOUTS)
        if isinstance(found, NotANorm) or found.over is Over.positions:
            return found
        if _spans_positions(module, shape):
            return dataclasses.replace(found, and_positions=True)
        read = dimensions_read(module, shape, shapes)
        if read is None:
            return found
        dimensions = () if read.last_only else read.read
        return dataclasses.replace(found, dimensions=dimensions, input_shape=read.shape)


def _probe(module: nn.Module, shape: tuple[int, ...], layouts: Sequence[Layout]) -> Finding | NotANorm:
    subject = _copy(module, shape, layouts)
    if isinstance(subject, NotANorm):
        return subject
    try:
        found = _probe_as(subject, Over.row)
        if isinstance(found, NotANorm):
            over_positions = _over_positions(subject)
            return found if over_positions is None else over_positions
        return found
    except NotCallable as error:
        return NotANorm(str(error))


def _spans_positions(module: nn.Module, shape: tuple[int, ...]) -> bool:
    try:
        return _reads_other_rows(Subject(module, shape, layouts=POSITION_LAYOUTS))
    except NotCallable:
        return False


def _copy(module: nn.Module, shape: tuple[int, ...], layouts: Sequence[Layout]) -> Subject | NotANorm:
    reason = ""
    for dtype in (torch.float64, torch.float32):
        for training in (False, True):
            try:
                return Subject(module, shape, dtype=dtype, training=training, layouts=layouts)
            except (NotCallable, RuntimeError) as error:
                reason = reason or str(error)
    return NotANorm(reason, ran=False)


def _over_positions(subject: Subject) -> Finding | None:
    for training in (False, True):
        try:
            other = subject.again(training=training)
            if _reads_other_rows(other):
                found = _probe_as(other, Over.positions)
                if isinstance(found, Finding):
                    return found
        except NotCallable:
            continue
    return None


def _reads_other_rows(subject: Subject) -> bool:
    rows = random_rows(ROWS, subject.width)
    others = rows.clone()
    others[1:] = random_rows(ROWS - 1, subject.width, 9)
    first, second = subject(rows)[0], subject(others)[0]
    return bool((first - second).abs().max() > TOLERANCE * first.abs().max())


def _reads_other_entries(subject: Subject) -> bool:
    rows = random_rows(ROWS, subject.width)
    others = rows.clone()
    others[:, 1:] = random_rows(ROWS, subject.width - 1, 9)
    first, second = subject(rows)[:, 0], subject(others)[:, 0]
    return bool((first - second).abs().max() > TOLERANCE * first.abs().max())


def _probe_as(subject: Subject, over: Over) -> Finding | NotANorm:
    """Probe with the statistic sought in each row, or over the rows."""
    if over is Over.row and subject.width < FEWEST_ENTRIES:
        return NotANorm(f"rows of {subject.width} entries are too short to probe")
    if over is Over.row and _reads_other_rows(subject):
        return NotANorm("a row's output depends on other rows")
    if over is Over.positions and _reads_other_entries(subject):
        return NotANorm("an entry's output depends on other entries and on other rows")
    original = {name: value.clone() for name, value in subject.tensors().items()}
    draw_values(subject, torch.Generator().manual_seed(3))
    rows = random_rows(POSITIONS if over is Over.positions else ROWS, subject.width, 4)
    reason = _scale_matters(subject, rows)
    if reason:
        return NotANorm(reason)
    parts = find_parts(subject, LARGE * rows)
    neutralise(subject, parts, original)
    if _saturates(subject, rows):
        return _bounded(subject, parts, rows)
    known = not any(part.role in (Role.shapes_gain, Role.both) for part in parts)
    core = find_core(subject, over, known_gain=known)
    if core is None:
        return NotANorm("it is scale-invariant, but not its input times one number a row")
    generator = torch.Generator().manual_seed(5)
    mask, leading = entries_read(core.call, core.width, generator)
    found = Finding(
        kind=Kind.norm,
        width=subject.width,
        over=over if core.groups == 1 else Over.groups,
        groups=core.groups,
        mean_share=core.mean_share,
        fixed_gain=core.fixed_gain,
        statistic=name_statistic(core.call, core.width, mask, generator) if mask.any() else "other",
        entries=subject.width if over is Over.positions else int(mask.sum()),
        leading=leading,
        output_length=float(subject(LARGE * rows).square().mean(-1).sqrt().median()),
        eps=_eps(subject, core, over, known),
    )
    return _with_behaviour(_with_affine(found, subject, parts, rows), subject, parts, original)


# ------------------------------------------------------------------------------------- is it a norm


def _scale_matters(subject: Subject, rows: Tensor) -> str | None:
    """Return why the map is not scale-invariant, or None where it is."""
    large, larger = odd_even(subject, LARGE * rows), odd_even(subject, 100 * LARGE * rows)
    size = float(large[0].abs().max())
    if not all(bool(torch.isfinite(one).all()) for one in (*large, *larger)):
        return "its output is not finite"
    if size == 0:
        return "its output does not change sign with its input"
    if max(float((a - b).abs().max()) for a, b in zip(large, larger, strict=True)) > 10 * TOLERANCE * size:
        return "its output changes with the scale of its input"
    return None


def _saturates(subject: Subject, rows: Tensor) -> bool:
    """Whether the output at large scales tells nothing but signs: a bounded map, no scale-invariant one."""
    stretched = rows * (
        torch.rand(rows.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64) + 0.5
    )
    first, second = subject(LARGE * rows), subject(LARGE * stretched)
    return bool((first - second).abs().max() <= 10 * TOLERANCE * first.abs().max())


def _bounded(subject: Subject, parts: list[Part], rows: Tensor) -> Finding | NotANorm:
    changed = rows.clone()
    changed[:, 0] += 1.0
    alone = bool((subject(rows) - subject(changed))[:, 1:].abs().max() <= TOLERANCE)
    # A plain activation function has no parameter; DyT without gain still has its alpha.
    if not (alone and _has_parameter(subject, rows)):
        return NotANorm("it is bounded, not scale-invariant")
    return _with_affine(Finding(kind=Kind.bounded, width=subject.width), subject, parts, rows)


def _has_parameter(subject: Subject, rows: Tensor) -> bool:
    before = subject(rows)
    parameters = dict(subject.module.named_parameters())
    for name, value in subject.tensors().items():
        if name in parameters:
            kept = value.clone()
            subject.set_values(name, kept * 1.5 + 0.25)
            changes = bool((subject(rows) - before).abs().max() > TOLERANCE * before.abs().max())
            subject.set_values(name, kept)
            if changes:
                return True
    return False


# ------------------------------------------------------------------------------------- what it does


def _with_affine(found: Finding, subject: Subject, parts: list[Part], rows: Tensor) -> Finding:
    gains = [part for part in parts if part.role is Role.gain]
    others = [part for part in parts if part.role in (Role.shapes_gain, Role.both)]
    added = [part for part in parts if part.role in (Role.bias, Role.both)]
    sizes = {part.size for part in gains}
    _, even = odd_even(subject, LARGE * rows)
    gain = Gain.entries if Gain.entries in sizes else Gain.scalar if gains else Gain.none
    return dataclasses.replace(
        found,
        gain=Gain.other if others else gain,
        gain_names=tuple(part.name for part in (*gains, *others)),
        gain_offset=gains[0].offset if gains and not others else None,
        fixed_gain=found.fixed_gain and not others,
        bias_names=tuple(part.name for part in added),
        adds_constant=bool(even.abs().max() > TOLERANCE) and all(part.role is Role.bias for part in added),
    )


def _eps(subject: Subject, core: FoundCore, over: Over, known_gain: bool) -> Eps:
    signs = torch.where(torch.arange(core.width) % 3 == 2, -1.0, 1.0)
    generator = torch.Generator().manual_seed(8)
    row = (torch.rand(core.width, generator=generator, dtype=torch.float64) + 0.5) * signs
    # What is added to the output, a bias aside, hides the output of much smaller rows.
    constant = odd_even(subject, random_rows(ROWS, subject.width))[1].abs().max()
    least = 1e-10 if constant > 1e-9 else 0.0
    eps = fit_eps(core.call, row, least=least)
    if subject.dtype is torch.float32:
        return eps
    try:
        narrow = find_core(subject.again(dtype=torch.float32), over, known_gain=known_gain)
    except (NotCallable, RuntimeError):
        return eps
    if narrow is None or narrow.width != core.width:
        return eps
    single = fit_eps(narrow.call, row, least=least)
    same = eps.position is single.position and math.isclose(eps.value, single.value, rel_tol=0.02)
    if same or single.position is EpsPosition.other:
        return eps
    return dataclasses.replace(single, float64_value=eps.value)


def _with_behaviour(
    found: Finding, subject: Subject, parts: list[Part], original: dict[str, Tensor]
) -> Finding:
    found = dataclasses.replace(
        found,
        dtype=str(subject.dtype).removeprefix("torch."),
        device=subject.device.type,
        half_statistics=halves.half_statistics(subject),
        gain_gradient=halves.gain_gradient(subject, parts),
        output_dtypes=halves.output_dtypes(subject),
        differs_in_training=not subject.training and _differs_in_training(subject),
        in_place=subject.overwrites,
    )
    for name, value in original.items():
        subject.set_values(name, value)
    training = _probe_as(subject.again(training=True), Over.row) if found.differs_in_training else None
    return dataclasses.replace(
        found,
        zero_row=halves.zero_row(subject),
        in_training=training if isinstance(training, Finding) else None,
    )


def _differs_in_training(subject: Subject) -> bool:
    rows = random_rows(ROWS, subject.width, 4)
    try:
        training = subject.again(training=True)(rows)
    except NotCallable:
        return False
    evaluation = subject(rows)
    return bool((training - evaluation).abs().max() > TOLERANCE * evaluation.abs().max())
