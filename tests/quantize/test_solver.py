"""The solver against brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier_format.quantize.solver import Choice, allocate, reachable_near

_ITEM = st.lists(
    st.builds(Choice, st.integers(0, 12).map(lambda n: 3 * n + 2), st.integers(0, 50).map(float)),
    min_size=1,
    max_size=4,
)


def _total(items: list[list[Choice]], chosen: list[int]) -> tuple[int, float]:
    picked = [item[n] for item, n in zip(items, chosen, strict=True)]
    return sum(choice.cost for choice in picked), math.fsum(choice.error for choice in picked)


def _best(items: list[list[Choice]], low: int, high: int) -> float | None:
    totals = [_total(items, list(chosen)) for chosen in itertools.product(*(range(len(item)) for item in items))]
    return min((error for cost, error in totals if low <= cost <= high), default=None)


@given(st.lists(_ITEM, min_size=1, max_size=4), st.integers(-5, 160), st.integers(0, 60))
def test_it_finds_the_least_error(items: list[list[Choice]], low: int, width: int) -> None:
    found = allocate(items, low, low + width)
    best = _best(items, low, low + width)
    if found is None:
        assert best is None
        return
    cost, error = _total(items, found)
    assert low <= cost <= low + width
    assert error == best


@given(st.lists(_ITEM, min_size=1, max_size=4), st.integers(0, 160))
def test_the_nearest_totals_are_those(items: list[list[Choice]], target: int) -> None:
    totals = {_total(items, list(c))[0] for c in itertools.product(*(range(len(item)) for item in items))}
    below = max((cost for cost in totals if cost <= target), default=None)
    above = min((cost for cost in totals if cost > target), default=None)
    assert reachable_near(items, target) == (below, above)


def _many(number: int, seed: int) -> list[list[Choice]]:
    """Experts as they are: errors fall by about 4 per bit, from very different starts; two sizes."""
    rng = np.random.default_rng(seed)
    starts = np.exp(rng.normal(0, 2, number))
    return [
        [Choice((1 + n % 2) * 512 * bits, float(start * 4.0**-bits * rng.uniform(0.97, 1.03))) for bits in (1, 2, 3)]
        for n, start in enumerate(starts)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_the_large_way_is_as_good_as_the_exact_one(seed: int) -> None:
    """Both ways on one problem. The large one may lose a little by what it leaves out; here it is 0.01 % at most."""
    items = _many(200, seed)
    high = 512 * 600
    low = high - 512 * 2
    exact = allocate(items, low, high)
    large = allocate(items, low, high, max_cells=4000)
    assert exact is not None
    assert large is not None
    cost, error = _total(items, large)
    assert low <= cost <= high
    assert error <= _total(items, exact)[1] * 1.0001
    assert _total(items, exact)[1] <= error


def test_a_real_number_of_experts_is_solved_to_the_last_step() -> None:
    items = _many(30_000, 7)
    high = 512 * 90_001
    found = allocate(items, high - 512, high)
    assert found is not None
    assert high - 512 <= _total(items, found)[0] <= high


def test_the_same_problem_has_the_same_answer_and_ties_go_to_the_cheaper() -> None:
    same = [[Choice(2, 1.0), Choice(4, 1.0)]] * 5
    assert allocate(same, 0, 100) == [0] * 5
    items = _many(300, 3)
    assert allocate(items, 0, 512 * 800) == allocate(items, 0, 512 * 800)


@pytest.mark.parametrize("error", [0.0, 3.0])
def test_items_that_nothing_improves_spend_as_well(error: float) -> None:
    """A model of zeros, or one expert that matters among many that do not."""
    items = [[Choice(512 * bits, error) for bits in (1, 2, 3)] for _ in range(400)]
    items[7] = [Choice(512 * bits, 4.0**-bits) for bits in (1, 2, 3)]
    low, high = 512 * 950 - 512, 512 * 950
    found = allocate(items, low, high, max_cells=5000)
    assert found is not None
    assert low <= _total(items, found)[0] <= high
    assert found[7] == 2


def test_what_cannot_be_is_none() -> None:
    items = [[Choice(4, 1.0), Choice(8, 0.5)]]
    assert allocate(items, 0, 3) is None
    assert allocate(items, 5, 7) is None
    assert allocate(items, 9, 20) is None
    assert allocate([], 0, 0) == []
    assert allocate([], 1, 2) is None
