"""Spend a budget of bits where it lowers the error most: a multiple-choice knapsack, solved deterministically.

Small problems are solved exactly by dynamic programming. Large ones are solved on the lower convex hull of each
item (the Lagrangian relaxation, which is optimal for its own budget), and then dynamic programming over the items
whose choice is nearest to changing spends what is left. The result depends on the numbers and their order alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_CELLS: Final = 30_000_000
"""Largest table of the dynamic program, in bytes: one choice each."""


class Choice(NamedTuple):
    """What one candidate of an item costs, in any integer unit, and the error that it leaves."""

    cost: int
    error: float


@dataclass(frozen=True, slots=True)
class _Step:
    """A step along the lower convex hull of an item: ``gain`` is the error it saves per unit of cost."""

    gain: float
    item: int
    choice: int
    cost: int


def allocate(items: Sequence[Sequence[Choice]], low: int, high: int, *, max_cells: int = MAX_CELLS) -> list[int] | None:
    """Return the index of the chosen candidate of each item, with the total cost in [low, high] and little error.

    The least error there is, where the table of the dynamic program has at most ``max_cells`` entries. Ties go to
    the lower total cost, then to the earlier candidates. None when no assignment costs that.
    """
    least = sum(min(choice.cost for choice in item) for item in items)
    if least > high:
        return None
    unit = _unit(items)
    if len(items) * (_range(items, unit, high - least) + 1) <= max_cells:
        return _exact(items, low, high, unit)
    found = _nearly(items, low, high, unit, max_cells)
    if found is None:
        # Items that no step improves have none along their hulls. A little gain on every step lets them spend, too.
        errors = sum(choice.error for item in items for choice in item)
        gain = 1e-9 * errors / high if errors and high else 1.0
        nudged = [[Choice(cost, error - gain * cost) for cost, error in item] for item in items]
        found = _nearly(nudged, low, high, unit, max_cells)
    return found


def _nearly(items: Sequence[Sequence[Choice]], low: int, high: int, unit: int, max_cells: int) -> list[int] | None:
    """Go along the hulls of all items, then solve a core of them exactly."""
    chosen, break_gain = _along_hulls(items, high)
    core = _core(items, break_gain, unit, max_cells)
    fixed = sum(item[choice].cost for n, (item, choice) in enumerate(zip(items, chosen, strict=True)) if n not in core)
    order = sorted(core)
    found = _exact([items[n] for n in order], low - fixed, high - fixed, unit)
    if found is None:
        return None
    for n, choice in zip(order, found, strict=True):
        chosen[n] = choice
    return chosen


def reachable_near(items: Sequence[Sequence[Choice]], target: int) -> tuple[int | None, int | None]:
    """Return the largest total cost up to ``target`` and the smallest above it; None where there is none.

    Exact; takes time and memory in proportion to the number of items times the range of costs.
    """
    unit = _unit(items)
    least = sum(min(choice.cost for choice in item) for item in items)
    reachable = 1  # bit n: a total of least + n * unit
    for item in items:
        base = min(choice.cost for choice in item)
        steps = {(choice.cost - base) // unit for choice in item}
        reachable = _union(reachable, sorted(steps))
    position = (target - least) // unit
    below = reachable & ((1 << (position + 1)) - 1) if position >= 0 else 0
    above = reachable >> max(position + 1, 0)
    return (
        least + (below.bit_length() - 1) * unit if below else None,
        least + (max(position + 1, 0) + (above & -above).bit_length() - 1) * unit if above else None,
    )


def _union(reachable: int, steps: Sequence[int]) -> int:
    result = 0
    for step in steps:
        result |= reachable << step
    return result


def _unit(items: Sequence[Sequence[Choice]]) -> int:
    """Return the greatest common divisor of all cost differences."""
    unit = 0
    for item in items:
        for choice in item[1:]:
            unit = gcd(unit, abs(choice.cost - item[0].cost))
    return unit or 1


def _range(items: Sequence[Sequence[Choice]], unit: int, room: int) -> int:
    most = sum(max(choice.cost for choice in item) - min(choice.cost for choice in item) for item in items)
    return min(most, max(room, 0)) // unit


def _exact(items: Sequence[Sequence[Choice]], low: int, high: int, unit: int) -> list[int] | None:
    bases = [min(choice.cost for choice in item) for item in items]
    least = sum(bases)
    if least > high:
        return None
    size = _range(items, unit, high - least) + 1
    best = np.full(size, np.inf)
    best[0] = 0.0
    tables: list[NDArray[np.uint8]] = []
    for item, base in zip(items, bases, strict=True):
        total = np.full(size, np.inf)
        table = np.zeros(size, np.uint8)
        for number, choice in enumerate(item):
            step = (choice.cost - base) // unit
            if step >= size:
                continue
            candidate = best[: size - step] + choice.error
            better = candidate < total[step:]
            total[step:][better] = candidate[better]
            table[step:][better] = number
        best = total
        tables.append(table)
    first = max(0, -((least - low) // unit))  # the smallest total that is not below low, in units above the least
    if first >= size or not np.isfinite(best[first:]).any():
        return None
    position = first + int(best[first:].argmin())
    chosen = [0] * len(items)
    for n in range(len(items) - 1, -1, -1):
        chosen[n] = int(tables[n][position])
        position -= (items[n][chosen[n]].cost - bases[n]) // unit
    return chosen


def _along_hulls(items: Sequence[Sequence[Choice]], high: int) -> tuple[list[int], float]:
    """Take the steps that save most per cost while they fit; return the choices and the gain of the first that did not.

    Steps of one item have falling gains, so they come in order.
    """
    chosen: list[int] = []
    steps: list[_Step] = []
    for n, item in enumerate(items):
        hull = _hull(item)
        chosen.append(hull[0])
        for before, after in pairwise(hull):
            cost = item[after].cost - item[before].cost
            steps.append(_Step((item[before].error - item[after].error) / cost, n, after, cost))
    left = high - sum(item[choice].cost for item, choice in zip(items, chosen, strict=True))
    for step in sorted(steps, key=lambda step: (-step.gain, step.item)):
        if step.cost > left:
            return chosen, step.gain
        left -= step.cost
        chosen[step.item] = step.choice
    return chosen, 0.0


def _hull(item: Sequence[Choice]) -> list[int]:
    """Return the candidates on the lower convex hull, from the cheapest on, each with less error."""
    order = sorted(range(len(item)), key=lambda n: (item[n].cost, item[n].error, n))
    hull: list[int] = []
    for n in order:
        if hull and (item[n].error >= item[hull[-1]].error or item[n].cost == item[hull[-1]].cost):
            continue
        while len(hull) > 1 and _above(item[hull[-2]], item[hull[-1]], item[n]):
            hull.pop()
        hull.append(n)
    return hull


def _above(left: Choice, middle: Choice, right: Choice) -> bool:
    """Tell whether ``middle`` lies on or above the line from ``left`` to ``right``."""
    before = (left.error - middle.error) * (right.cost - middle.cost)
    after = (middle.error - right.error) * (middle.cost - left.cost)
    return before <= after


def _core(items: Sequence[Sequence[Choice]], break_gain: float, unit: int, max_cells: int) -> set[int]:
    """Return the items with a step whose gain is nearest to the break, as many as the table has room for."""
    distances = []
    for n, item in enumerate(items):
        hull = _hull(item)
        gains = [
            (item[before].error - item[after].error) / (item[after].cost - item[before].cost)
            for before, after in pairwise(hull)
        ]
        if gains:
            distances.append((min(abs(gain - break_gain) for gain in gains), n))
    core: set[int] = set()
    span = 0
    for _, n in sorted(distances):
        costs = [choice.cost for choice in items[n]]
        span += (max(costs) - min(costs)) // unit
        if core and (len(core) + 1) * (span + 1) > max_cells:
            break
        core.add(n)
    return core
