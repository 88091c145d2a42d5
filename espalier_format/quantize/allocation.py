"""From a total width, or averages, to one codebook per module."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from espalier_format.checkpoint.components import NOT_DECODER
from espalier_format.errors import UsageError
from espalier_format.quantize.solver import Choice, allocate, reachable_near

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from espalier_format.codec.codebook import Codebook
    from espalier_format.quantize.plan import ModulePlan, Plan

TOLERANCE: Final = Fraction(5, 1000)
"""How far the ``bits`` of the output may be from those asked for."""

_NEAR_CELLS: Final = 2_000_000_000
"""Bits of memory times items that finding the nearest reachable widths may take."""


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Modules that share one budget. ``groups`` have several candidates; ``fixed`` are half bits spent by others.

    ``target`` is in bits per true weight, over ``weights``. An ``exact`` target must be met within `TOLERANCE`;
    another is an upper bound.
    """

    name: str
    groups: tuple[tuple[ModulePlan, ...], ...]
    fixed: int
    weights: int
    target: Fraction
    exact: bool

    def least(self) -> int:
        """Return the least half bits that the pool can take."""
        return self.fixed + sum(min(_costs(group)) for group in self.groups)

    def most(self) -> int:
        """Return the most half bits that the pool can take."""
        return self.fixed + sum(max(_costs(group)) for group in self.groups)

    def bits(self, half_bits: int) -> float:
        """Return a total as bits per weight."""
        return half_bits / (2 * self.weights)


def make_pools(plan: Plan, bits: float | None) -> tuple[Pool, ...]:
    """Return the budgets of a plan, each checked to be possible.

    With ``bits`` the decoder has one budget. Without, and for modules outside the decoder, the modules of one rule
    share the budget that its ``average`` makes.

    Raises:
        UsageError: a budget cannot be met, with the range that can be; or there is none for modules with several
            candidates; or ``bits`` is not positive.
    """
    pools: list[Pool] = []
    rest = plan.modules
    if bits is not None:
        if not (math.isfinite(bits) and bits > 0):
            raise UsageError("--bits must be a finite number above 0", got=bits)
        decoder = [module for module in plan.modules if module.in_decoder]
        stored = [
            linear.quantized
            for linear in plan.kept
            if linear.quantized is not None and linear.component not in NOT_DECODER
        ]
        if not decoder:
            raise UsageError("--bits is about decoder modules, and the recipe quantizes none")
        fixed = sum(module.codebook.half_steps * module.padded_in * module.padded_out for module in stored)
        weights = sum(module.weights for module in stored)
        pools.append(_pool("the decoder", decoder, fixed, weights, Fraction(str(bits)), exact=True))
        rest = tuple(module for module in plan.modules if not module.in_decoder)
    for number in sorted({module.rule for module in rest if len(module.candidates) > 1}):
        members = [module for module in rest if module.rule == number]
        average = members[0].average
        if average is None:
            hint = "give --bits" if members[0].in_decoder else "the rule needs an average"
            raise UsageError(
                f"{plan.recipe.name}: rule {number + 1} has several codebooks and nothing to choose by; {hint}",
                tensor=members[0].name,
            )
        pools.append(_pool(f"rule {number + 1}", members, 0, 0, average, exact=False))
    for pool in pools:
        _check_range(pool)
        # Whether a choice of widths comes near enough depends on sizes alone, so it need not be found out later.
        _solve(pool, [[Choice(cost, -float(cost)) for cost in _costs(group)] for group in pool.groups])
    return tuple(pools)


def choose_codebooks(plan: Plan, pools: Sequence[Pool], errors: Mapping[str, Sequence[float]]) -> dict[str, Codebook]:
    """Return the codebook of every module. ``errors``: of each candidate, weighted, where there are several.

    Raises:
        UsageError: no choice comes near enough to an exact target; the message names what does.
    """
    chosen = {module.name: module.candidates[0] for module in plan.modules if len(module.candidates) == 1}
    for pool in pools:
        items = [
            [
                Choice(cost, math.fsum(errors[module.name][n] for module in group))
                for n, cost in enumerate(_costs(group))
            ]
            for group in pool.groups
        ]
        for group, choice in zip(pool.groups, _solve(pool, items), strict=True):
            chosen.update((module.name, module.candidates[choice]) for module in group)
    return chosen


def _pool(name: str, modules: Sequence[ModulePlan], fixed: int, weights: int, target: Fraction, *, exact: bool) -> Pool:
    groups: dict[str, list[ModulePlan]] = {}
    for module in modules:
        weights += module.linear.weights
        if len(module.candidates) > 1:
            groups.setdefault(module.group, []).append(module)
        else:
            fixed += module.cost(module.candidates[0])
    return Pool(name, tuple(tuple(group) for group in groups.values()), fixed, weights, target, exact)


def _costs(group: Sequence[ModulePlan]) -> list[int]:
    return [sum(module.cost(codebook) for module in group) for codebook in group[0].candidates]


def _check_range(pool: Pool) -> None:
    least, most = pool.bits(pool.least()), pool.bits(pool.most())
    tolerance = float(TOLERANCE) if pool.exact else 0.0
    too_low = least > float(pool.target) + tolerance
    too_high = pool.exact and most < float(pool.target) - tolerance
    if too_low or too_high:
        reach = f"{least:.4f}" if pool.least() == pool.most() else f"{least:.4f} to {most:.4f}"
        raise UsageError(
            f"{float(pool.target):g} bits per weight cannot be met for {pool.name}: its candidates reach {reach}, "
            "padding included"
        )


def _solve(pool: Pool, items: Sequence[Sequence[Choice]]) -> list[int]:
    def half_bits(bits: Fraction) -> Fraction:
        return bits * 2 * pool.weights - pool.fixed

    high = math.floor(half_bits(pool.target))
    if not pool.exact:
        return _found(allocate(items, pool.least() - pool.fixed, high))
    low = math.ceil(half_bits(pool.target - TOLERANCE))
    found = allocate(items, low, high)
    if found is None:
        found = allocate(items, high + 1, math.floor(half_bits(pool.target + TOLERANCE)))
    if found is not None:
        return found
    raise UsageError(
        f"no choice of widths comes within {float(TOLERANCE):g} of {float(pool.target):g} bits per weight"
        + _nearest(pool, items, high)
    )


def _found(choice: list[int] | None) -> list[int]:
    if choice is None:
        raise UsageError("no choice of widths fits the average")
    return choice


def _nearest(pool: Pool, items: Sequence[Sequence[Choice]], high: int) -> str:
    if len(items) * (pool.most() - pool.least()) > _NEAR_CELLS:
        return ""
    near = [pool.bits(total + pool.fixed) for total in reachable_near(items, high) if total is not None]
    return f"; the nearest are {' and '.join(f'{bits:.4f}' for bits in near)}"
