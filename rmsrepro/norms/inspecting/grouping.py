"""Names of many layers in one: blocks.0.norm, blocks.1.norm, blocks.2.norm are blocks.0-2.norm."""

from __future__ import annotations

from collections.abc import Iterable

Part = str | frozenset[int]


def collapse(paths: Iterable[str]) -> list[str]:
    """Return the paths with the numbers that differ drawn together, in the order of their first members.

    Paths that differ in one number only become one, whose number is a set of ranges; then those that differ
    in another.
    """
    groups: list[tuple[Part, ...]] = [
        tuple(frozenset([int(part)]) if part.isdecimal() else part for part in path.split("."))
        for path in paths
    ]
    deepest = max((len(group) for group in groups), default=0)
    for place in reversed(range(deepest)):
        merged: dict[tuple[object, ...], tuple[Part, ...]] = {}
        for group in groups:
            numbered = place < len(group) and isinstance(group[place], frozenset)
            key: tuple[object, ...] = (
                (*group[:place], None, *group[place + 1 :]) if numbered else (*group, "apart")
            )
            other = merged.get(key)
            if other is not None and numbered:
                both = frozenset[int]([*_numbers(other[place]), *_numbers(group[place])])
                group = (*group[:place], both, *group[place + 1 :])
            merged[key] = group
        groups = list(merged.values())
    return [
        ".".join(_ranges(part) if isinstance(part, frozenset) else part for part in group) for group in groups
    ]


def _numbers(part: Part) -> frozenset[int]:
    return part if isinstance(part, frozenset) else frozenset()


def _ranges(numbers: frozenset[int]) -> str:
    """0-2,5 of {0, 1, 2, 5}."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
