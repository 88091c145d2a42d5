"""The reference search against searches that share no code with it.

The small trellises have 16 states of 4 bits and a ring of 8 or 10 positions, so that every path can be listed.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from espalier_format.codec.codebook import get_codebook
from espalier_format.encoder import EXACT, FAST, THOROUGH, Effort
from espalier_format.encoder.branch_cost import BranchCost, branch_cost
from espalier_format.encoder.numpy_backend import best_path, search

STATE_BITS = 4


def small_cost(rng: np.random.Generator, bits: list[int], distinct: int) -> BranchCost:
    """Branch costs of a trellis of 16 states with few distinct codes, so that ties are common."""
    codes = (rng.integers(0, distinct, 1 << STATE_BITS) * 900).astype(np.int16)
    return replace(branch_cost(get_codebook("e2m1@2")), codes=codes, bits=np.array(bits))


def all_rings(bits: list[int]) -> list[list[int]]:
    """The states of every tail-biting path, made from the definition: state = the last 4 bits of the stream."""
    ends = np.cumsum(bits)
    rings = []
    for stream in product((0, 1), repeat=int(ends[-1])):
        windows = [[stream[(end - STATE_BITS + k) % len(stream)] for k in range(STATE_BITS)] for end in ends]
        rings.append([int("".join(map(str, window)), 2) for window in windows])
    return rings


def path_cost(cost: BranchCost, target: np.ndarray, path: list[int]) -> int:
    """The sum of the module docstring's rule, in Python integers."""
    total = 0
    for wanted, state in zip(target.tolist(), path, strict=True):
        distance = min(abs(wanted - int(cost.codes[state])), cost.limit)
        total += (distance << cost.shift) ** 2 >> cost.drop
    return total


@pytest.mark.parametrize("bits", [[1] * 8, [2] * 5, [1, 2] * 4, [1] * 10])
def test_best_ring_of_a_boundary(bits: list[int]) -> None:
    """Optimal for every boundary, and of equal paths the one with the lowest states from the end."""
    rng = np.random.default_rng(sum(bits))
    rings = all_rings(bits)
    ties = 0
    for trial in range(2):
        cost = small_cost(rng, bits, distinct=2 + 6 * trial)
        target = (450 * rng.integers(-2, 3 + 12 * trial, len(bits))).astype(np.int16)
        for boundary in range(1 << STATE_BITS):
            costs = sorted((path_cost(cost, target, r), r[::-1]) for r in rings if r[-1] == boundary)
            assert best_path(target, cost.bits, cost, boundary).tolist() == costs[0][1][::-1]
            ties += costs[0][0] == costs[1][0]
    assert ties > 0


@pytest.mark.parametrize(("effort", "reach"), [(EXACT, 4), (FAST, 2)])
def test_search_takes_the_boundary_of_the_free_pass(effort: Effort, reach: int) -> None:
    bits = [1] * 8
    rng = np.random.default_rng(3)
    cost = small_cost(rng, bits, distinct=4)
    targets = rng.integers(-1000, 6000, (20, 8)).astype(np.int16)
    starts = range(1 << STATE_BITS)
    for target, found in zip(targets, search(targets, cost, effort, 1).tolist(), strict=True):
        seen = np.roll(target, reach)[: 2 * reach]
        # Every open path: the state before its first position, then a new bit for each.
        free = []
        for start, news in product(starts, product((0, 1), repeat=2 * reach)):
            path = [start]
            for new in news:
                path.append((path[-1] << 1 | new) & 0xF)
            free.append((path_cost(cost, seen, path[1:]), path[:0:-1]))
        boundary = min(free)[1][::-1][reach - 1]  # position 7
        assert found[-1] == boundary
        closed = [r for r in all_rings(bits) if r[-1] == boundary]
        assert path_cost(cost, target, found) == min(path_cost(cost, target, r) for r in closed)


def test_a_third_pass_frees_the_first_boundary() -> None:
    """It is optimal for the state that the second pass gave the position half a ring away from its boundary."""
    bits = [1] * 8
    rng = np.random.default_rng(4)
    cost = small_cost(rng, bits, distinct=6)
    targets = rng.integers(-1000, 6000, (20, 8)).astype(np.int16)
    rings = all_rings(bits)
    moved = 0
    for target, two, three in zip(
        targets, search(targets, cost, EXACT, 1), search(targets, cost, THOROUGH, 1), strict=True
    ):
        assert three[3] == two[3]
        closed = [r for r in rings if r[3] == two[3]]
        assert path_cost(cost, target, three.tolist()) == min(path_cost(cost, target, r) for r in closed)
        moved += three[7] != two[7]
    assert moved > 0


def test_search_is_near_the_best_of_all_boundaries() -> None:
    """The exhaustive oracle: never below it, and close to it on average; small rings are the hard case."""
    bits = [1] * 10
    rng = np.random.default_rng(5)
    cost = small_cost(rng, bits, distinct=8)
    targets = rng.integers(-500, 6800, (30, 10)).astype(np.int16)
    rings = all_rings(bits)
    best = [min(path_cost(cost, target, r) for r in rings) for target in targets]
    found = [path_cost(cost, t, s) for t, s in zip(targets, search(targets, cost, EXACT, 1).tolist(), strict=True)]
    assert all(f >= b for f, b in zip(found, best, strict=True))
    assert sum(f == b for f, b in zip(found, best, strict=True)) >= 10
    assert sum(found) < 1.25 * sum(best)


def test_best_ring_of_a_boundary_full_size() -> None:
    """At 8 bits a state is two symbols, so a chain of 256 symbols with pairwise costs is the same problem."""
    cost = branch_cost(get_codebook("exl3-mul1@8"))
    rng = np.random.default_rng(11)
    target = cost.fixed_point(rng.standard_normal(256), 1.0)
    boundary = int(rng.integers(0, 65536))

    codes = cost.codes.astype(np.int64).reshape(256, 256)  # [previous symbol, symbol]
    total = np.full(256, 1 << 60)
    total[boundary & 0xFF] = 0
    for position, wanted in enumerate(target.tolist()):
        total = (total[:, None] + np.minimum(np.abs(wanted - codes), cost.limit) ** 2).min(axis=0)
        if position in (254, 255):
            last = boundary >> 8 if position == 254 else boundary & 0xFF
            total = np.where(np.arange(256) == last, total, 1 << 60)

    path = best_path(target, cost.bits, cost, boundary).tolist()
    assert path[-1] == boundary
    assert path_cost(cost, target, path) == total.min()
