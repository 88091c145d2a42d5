"""The reference search: the definition of the encoder, in plain numpy and unbounded integers.

A tile is a ring of 256 positions; the state of position i is the 16 stream bits that end with its own new bits,
``state[i] = (state[i-1] << bits[i] | new) & 0xFFFF``, cyclic (spec/packing.md). So the predecessors of state s are
``p << (16 - bits) | s >> bits`` for p = 0, 1, ..., 2^bits - 1: all states of one *group* ``s >> bits`` share them.

*Exact* encoding means two passes. The first searches the ring as an open path that starts at position 128, goes
round, and may begin and end anywhere; it fixes the state of position 255, which is deep inside that path. The
second starts there at position 0 and must end there at position 255: its path is optimal among all with that
boundary. A third pass does the same half a ring further: it keeps the state that the second gave position 127, and
so frees the one of position 255. It never costs more. A fourth would go back to position 0, and so on. A *short* first
pass goes only from position 192 to position 63, so that the boundary is 64 positions deep inside its path.

Of paths that cost the same, the one with the lowest state at its last position is taken, then at the last but one,
and so on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from espalier_format.encoder.branch_cost import BranchCost
from espalier_format.encoder.effort import Effort


def search(targets: NDArray[np.int16], cost: BranchCost, effort: Effort, threads: int) -> NDArray[np.uint16]:
    """Find the states of rings: the reference `Backend`, one ring after the other on one thread.

    The length of a ring and the number of states are those of ``cost``, so that tests can search small trellises.
    """
    del threads
    states = np.empty(targets.shape, np.uint16)
    for ring, target in zip(states, targets, strict=True):
        half, reach = target.size // 2, effort.reach(target.size)
        around = np.arange(-reach, reach)
        boundary = int(best_path(target[around], cost.bits[around], cost, None)[reach - 1])
        for index in range(1, effort.passes):
            first = 0 if index % 2 else half
            path = best_path(np.roll(target, -first), np.roll(cost.bits, -first), cost, boundary)
            boundary = int(path[half - 1])  # of the position half a ring before the next pass's last
            ring[:] = np.roll(path, first)
    return states


def best_path(
    target: NDArray[np.int16], bits: NDArray[np.int64], cost: BranchCost, boundary: int | None
) -> NDArray[np.uint16]:
    """Return the cheapest path along ``target``; with a ``boundary``, one that starts and ends in that state."""
    levels, level = np.unique(cost.codes, return_inverse=True)  # a step has few distinct costs
    metric = np.zeros(cost.codes.size, np.int64)
    if boundary is not None:
        metric[:] = np.iinfo(np.int64).max // 2
        metric[boundary] = 0

    chosen: list[NDArray[np.intp]] = []
    for wanted, new_bits in zip(target, bits, strict=True):
        groups = metric.reshape(1 << new_bits, -1)  # [p, g]: state p << (16 - bits) | g, a predecessor of group g
        chosen.append(groups.argmin(axis=0))  # the first minimum: the lowest predecessor
        metric = groups.min(axis=0).repeat(1 << new_bits) + cost.of(int(wanted), levels)[level]

    path = np.empty(target.size, np.uint16)
    state = int(metric.argmin()) if boundary is None else boundary
    for position in reversed(range(target.size)):
        path[position] = state
        group = state >> int(bits[position])
        state = int(chosen[position][group]) * chosen[position].size + group
    return path
