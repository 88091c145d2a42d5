"""The fast search on a CPU: the reference's passes on packed metrics of 16 or 32 bits, compiled by numba.

What makes it fast:

- Path metrics of single states never reach memory. What passes from a step to the next is the least metric of every
  *group*, the 2^(16 - bits) sets of states that share their successors. One sweep takes a position: for 32 neighbouring
  groups of the next position it goes through the states that lead there, 32 of each branch, adds their costs to the
  metrics of the groups they came from, and keeps the least and which branch it was. All of it is contiguous in memory.
- Which branch won is stored for a group, not for a state: one byte each.
- The least metric is subtracted one step late, so that it is known; `branch_cost` proves that metrics still fit.
- The cost is computed, not looked up: five operations on 32 states beat 32 loads from a table.
- `lanes` states the vector operations instead of hoping for the compiler to find them.

Compiling takes about a second a width, and is not cached on disk: an encoding run lasts minutes to hours.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from espalier_format.codec.codebook import STATES
from espalier_format.codec.tile import RING
from espalier_format.encoder import lanes
from espalier_format.encoder.branch_cost import BranchCost
from espalier_format.encoder.effort import Effort

_HALF: Final = RING // 2
_STATE_BITS: Final = 16
_compile: Final[Callable[[Callable[..., Any]], Callable[..., Any]]] = njit(nogil=True)


def search(targets: NDArray[np.int16], cost: BranchCost, effort: Effort, threads: int) -> NDArray[np.uint16]:
    """Find the states of rings: a `Backend` that shares the rings between ``threads`` threads.

    A thread needs about 8 MiB at 1 bit, half of that at 2, and so on.
    """
    even_bits, odd_bits = int(cost.bits[0]), int(cost.bits[1])
    kernel = _ring_kernel(even_bits, odd_bits, cost.limit, cost.shift, cost.wide)
    metric_type = np.uint32 if cost.wide else np.uint16
    codes = _aligned(STATES, metric_type)
    codes[:] = cost.codes.astype(np.int32).astype(metric_type)  # two's complement: differences wrap to the right ones
    states = np.empty(targets.shape, np.uint16)
    groups = STATES >> min(even_bits, odd_bits)

    def work(rings: slice) -> None:
        metrics, chosen = _aligned(2 * groups, metric_type), _aligned(RING * groups, np.uint8)
        unreachable = metric_type(cost.unreachable)
        scratch = metrics.reshape(2, -1), chosen.reshape(RING, -1)
        kernel(targets[rings], codes, effort.passes, effort.reach(RING), unreachable, *scratch, states[rings])

    share = -(-len(targets) // threads)
    parts = [slice(start, start + share) for start in range(0, len(targets), max(share, 1))]
    if len(parts) < 2:
        for part in parts:
            work(part)
    else:
        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(work, parts))
    return states


def _aligned(count: int, dtype: type[np.generic]) -> NDArray[Any]:
    """Return an uninitialised array whose address is a multiple of the size of `lanes.Lanes`."""
    size = count * np.dtype(dtype).itemsize
    memory = np.empty(size + lanes.LANES_BYTES, np.uint8)
    start = -memory.ctypes.data % lanes.LANES_BYTES
    return memory[start : start + size].view(dtype)


@cache
def _sweep_kernel(bits: int, next_bits: int, limit: int, shift: int, wide: bool) -> Callable[..., Any]:
    """Return the compiled sweep of a position of ``bits`` new bits whose successor has ``next_bits``.

    It goes from ``before``, the metrics of the position's groups less ``base``, to ``after``, those of the next
    position's, notes in ``chosen`` which state of each led there, and returns the least of ``after``.
    """
    successors, branches, groups = 1 << bits, 1 << next_bits, STATES >> next_bits
    count = lanes.LANES_BYTES // (4 if wide else 2)

    @_compile
    def sweep(target, codes, base, before, after, chosen):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        zero = lanes.fill(lanes.load(before, 0), 0)
        targets, bases = lanes.fill(zero, target), lanes.fill(zero, base)
        limits, shifts = lanes.fill(zero, limit), lanes.fill(zero, shift)
        lowest = lanes.fill(zero, -1)
        for group in range(0, groups, count):
            least, winner = lanes.fill(zero, -1), zero
            for branch in range(branches):
                state = branch * groups + group
                distance = lanes.absolute(lanes.subtract(targets, lanes.load(codes, state)))
                cost = lanes.square(lanes.shift_left(lanes.minimum(distance, limits), shifts))
                metric = lanes.add(lanes.load_repeated(before, state >> bits, successors), cost)
                winner = lanes.where_less(metric, least, lanes.fill(zero, branch), winner)
                least = lanes.minimum(metric, least)
            least = lanes.subtract(least, bases)
            lowest = lanes.minimum(lowest, least)
            lanes.store(after, group, least)
            lanes.store(chosen, group, winner)
        return lanes.smallest(lowest)

    return sweep


@cache
def _ring_kernel(even_bits: int, odd_bits: int, limit: int, shift: int, wide: bool) -> Callable[..., Any]:
    """Return the compiled search of some rings: all passes of each, and the tracing back of their paths."""
    even_sweep = _sweep_kernel(even_bits, odd_bits, limit, shift, wide)
    odd_sweep = _sweep_kernel(odd_bits, even_bits, limit, shift, wide)

    @_compile
    def forward(first, steps, target, codes, metrics, chosen):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        # Sweep positions of the ring, an even number. The metrics begin in metrics[0], and end there.
        base = metrics[0, 0] & 0
        for step in range(steps):
            position = (first + step) % RING
            before, after, origin = metrics[step % 2], metrics[1 - step % 2], chosen[(position + 1) % RING]
            if position % 2 == 0:
                base = even_sweep(target[position], codes, base, before, after, origin)
            else:
                base = odd_sweep(target[position], codes, base, before, after, origin)

    @_compile
    def predecessor(position, group, chosen):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        # The state before ``position`` on the best path to the group.
        bits = odd_bits if position % 2 else even_bits
        return (np.int64(chosen[position, group]) << (_STATE_BITS - bits)) | group

    @_compile
    def rings(targets, codes, passes, reach, unreachable, metrics, chosen, states):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        groups = STATES >> even_bits  # of every even position
        for ring in range(len(targets)):
            metrics[0, :] = 0
            forward(RING - reach, 2 * reach, targets[ring], codes, metrics, chosen)
            least = metrics[0, :groups].min()
            state = np.int64(STATES)
            for group in range(groups):
                if metrics[0, group] == least:
                    state = min(state, predecessor(reach, group, chosen))
            for position in range(reach - 1, -1, -1):
                bits = odd_bits if position % 2 else even_bits
                state = predecessor(position, state >> bits, chosen)

            for index in range(1, passes):
                first = 0 if index % 2 else _HALF
                metrics[0, :] = unreachable
                metrics[0, state % groups] = 0
                forward(first, RING, targets[ring], codes, metrics, chosen)
                for step in range(RING - 1, -1, -1):
                    position = (first + step) % RING
                    states[ring, position] = state
                    bits = odd_bits if position % 2 else even_bits
                    state = predecessor(position, state >> bits, chosen)
                state = np.int64(states[ring, (first + _HALF - 1) % RING])

    return rings
