"""Single layers as a bench measured them: seconds, bytes a second, distance to the machine's limit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rmsrepro.norms.settings import whole
from rmsrepro.report.parameters import Names, key_of
from rmsrepro.report.records import BenchRecord, TimedArm, machine_name
from rmsrepro.report.savings import MODES, arm_order
from rmsrepro.report.timing import StepTime


@dataclass(frozen=True)
class LayerTime:
    """One arm of a layer bench."""

    title: str
    """Mode and shape, with what tells places of one name apart."""
    arm: TimedArm
    saving: StepTime | None
    """Against LayerNorm on the same backend; None for LayerNorm itself."""

    def label(self, names: Names) -> str:
        """`RMSNorm, torch`."""
        return f"{names.given(self.arm.norm, self.arm.params)}, {self.arm.backend}"


def layer_times(benches: Iterable[BenchRecord], times: Sequence[StepTime]) -> list[LayerTime]:
    """Return the measured layers of the newest bench of each kind, by mode and shape, LayerNorm first.

    Args:
        times: the comparisons that go with them.
    """
    found: dict[tuple[object, ...], LayerTime] = {}
    order: dict[tuple[object, ...], int] = {}
    for bench in sorted(benches, key=lambda bench: -bench.written):
        for arm in bench.arms:
            if arm.level != "layer" or arm.role != "norm" or not math.isfinite(arm.median_s):
                continue
            machine = machine_name(bench.machine)
            place = (arm.mode, arm.shape, arm.dtype, arm.device, arm.threads, machine)
            key = (*place, arm.norm, arm.backend, key_of(whole(arm.norm, arm.params)))
            order.setdefault(place, len(order))
            found.setdefault(key, LayerTime(_title(arm), arm, _saving(arm, bench, times)))
    rows = sorted(
        found.items(),
        key=lambda item: (
            order[item[0][:6]],
            *arm_order(item[1].arm.norm, item[1].arm.params, item[1].arm.backend),
        ),
    )
    return _apart([(key[:6], row) for key, row in rows])


def _title(arm: TimedArm) -> str:
    return f"{MODES.get((arm.level, arm.mode), arm.mode)}: {arm.shape.replace(' ', '')}"


def _saving(arm: TimedArm, bench: BenchRecord, times: Sequence[StepTime]) -> StepTime | None:
    for time in times:
        c = time.comparison
        if (
            time.bench_id == bench.bench_id
            and (c.plain_norm, c.backend, c.shape, c.mode, c.dtype)
            == (arm.norm, arm.backend, arm.shape, arm.mode, arm.dtype)
            and c.params == arm.params
            and time.measured
        ):
            return time
    return None


def _apart(rows: Sequence[tuple[tuple[object, ...], LayerTime]]) -> list[LayerTime]:
    """Add type, device, threads and machine to the titles where the page has several."""
    seen = [{place[number] for place, _ in rows} for number in range(2, 6)]
    told = []
    for place, row in rows:
        words = [
            f"{value} threads" if number == 4 else str(value)
            for number, value in enumerate(place)
            if number >= 2 and len(seen[number - 2]) > 1
        ]
        title = f"{row.title} ({', '.join(words)})" if words else row.title
        told.append(LayerTime(title, row.arm, row.saving))
    return told
