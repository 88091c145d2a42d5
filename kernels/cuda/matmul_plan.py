"""How a product is cut into thread blocks: chosen from shape, width, rows and device alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple

from espalier_format.codec.codebook import Codebook
from espalier_format.codec.tile import TILE
from espalier_format.errors import UsageError

_TABLE: Final = 65536
_RESERVED: Final = 1024
"""Shared memory that a thread block may have below its own."""
_SUMS_BYTES: Final = 32768
"""What the buffers of sums should not exceed."""
_MOST_RANKS: Final = 16


WARPS: Final = 16
"""Warps of a thread block."""


@dataclass(frozen=True, slots=True)
class Device:
    """What a plan has to know of a device."""

    multiprocessors: int
    shared_bytes: int
    """Shared memory that a thread block may ask for."""

    @property
    def aligned_table(self) -> bool:
        """Whether there is room for the table at a multiple of its size, with something on both sides."""
        return self.shared_bytes >= 160 << 10

    @property
    def max_rows(self) -> int:
        """The most rows of one launch: what has to be in shared memory at once fits."""
        return 64 if self.shared_bytes >= 200 << 10 else 32 if self.aligned_table else 16


@dataclass(frozen=True, slots=True)
class Plan:
    """How one product is cut up; ``matmul.cu`` says what the parts are."""

    rows: int
    groups: int
    tiles: int
    column_groups: int
    buffers: int
    ranks: int
    """Thread blocks that share a block of columns along k; 1: the sequence of all units is cut into equal shares."""
    thread_blocks: int
    """Of each rank."""
    blocks: int
    """Blocks of columns."""
    units: int
    unit_tiles: int
    contributions: int
    """The most thread blocks that have a part of one block of columns."""
    slice_tiles: int
    inputs_at: int
    sums_at: int
    shared_bytes: int
    prepared: bool
    """Whether a kernel of its own rotates the inputs."""
    clocks: float
    """Estimated."""

    @property
    def width(self) -> int:
        """Columns of a block."""
        return self.column_groups * self.tiles * TILE


class _Room(NamedTuple):
    """Where things lie in shared memory, in bytes from its start."""

    slice_tiles: int
    inputs_at: int
    sums_at: int
    end: int


@lru_cache(maxsize=4096)
def make_plan(
    codebook: Codebook, rotation_in: int, rotation_out: int, k_tiles: int, n_tiles: int, rows: int, device: Device
) -> Plan:
    """Choose how a product of 1 to ``device.max_rows`` rows is cut up; the same arguments give the same plan.

    Raises UsageError for a weight that is too large for the kernel's 32-bit arithmetic in every plan.
    """
    possible = candidates(codebook, rotation_in, rotation_out, k_tiles, n_tiles, rows, device)
    best = min(possible, key=lambda plan: plan.clocks, default=None)
    if best is None:
        raise UsageError(
            "the weight is too large to be multiplied by one kernel", got=f"{n_tiles * TILE} x {k_tiles * TILE}"
        )
    return best


def candidates(
    codebook: Codebook, rotation_in: int, rotation_out: int, k_tiles: int, n_tiles: int, rows: int, device: Device
) -> Iterator[Plan]:
    """Yield the plans that are possible: all numbers of the kernel's ``Cut`` fit 32 bits."""
    groups = next(groups for groups in (1, 2, 4, 8) if 8 * groups >= rows)
    width = max(128, rotation_out)
    blocks = -(-n_tiles * TILE // width)
    unit = max(rotation_in, 64) // TILE
    all_units = -(-k_tiles // unit)
    cuts = [(1, all_units), (1, 1), *((ranks, ranks) for ranks in range(2, min(_MOST_RANKS, all_units) + 1))]
    for tiles in (1, 2, 4):
        if (tiles == 1 and codebook.half_steps % 2) or (tiles == 4 and (groups >= 4 or codebook.half_steps >= 10)):
            continue
        for ranks, parts in cuts:
            unit_tiles = -(-all_units // parts) * unit
            units = -(-k_tiles // unit_tiles)
            if ranks > 1 and units != ranks:
                continue
            thread_blocks, contributions = _divide(blocks, units, ranks, device.multiprocessors)
            if (blocks * units + 1) * thread_blocks >= 1 << 32:
                continue
            inputs = unit_tiles if ranks > 1 else -(-k_tiles // 4) * 4
            buffers = WARPS // (width // (TILE * tiles))
            while buffers > 1 and buffers * rows * (width + 4) * 4 > _SUMS_BYTES:
                buffers //= 2
            room = _room(rows, inputs, unit, buffers * rows * (width + 4) * 4, codebook.is_grid, device)
            plan = Plan(
                rows=rows, groups=groups, tiles=tiles, column_groups=width // (TILE * tiles),
                buffers=buffers, ranks=ranks, thread_blocks=thread_blocks, blocks=blocks, units=units,
                unit_tiles=unit_tiles, contributions=contributions, slice_tiles=room.slice_tiles,
                inputs_at=room.inputs_at, sums_at=room.sums_at, shared_bytes=room.end, prepared=False, clocks=0.0,
            )  # fmt: skip
            yield replace(plan, clocks=_clocks(plan, inputs))
            if rows > 1:
                prepared = replace(plan, prepared=True)
                yield replace(prepared, clocks=_clocks(prepared, inputs))


def _divide(blocks: int, units: int, ranks: int, multiprocessors: int) -> tuple[int, int]:
    """Return the thread blocks of each rank, and the most that have a part of one block of columns."""
    if ranks > 1:
        return min(max(multiprocessors // ranks, 1), blocks), ranks
    items = blocks * units
    thread_blocks = min(multiprocessors, items)
    if units == 1 or (items % thread_blocks == 0 and items // thread_blocks % units == 0):
        return thread_blocks, 1
    # The owner of an item is ((item + 1) * thread_blocks - 1) // items. With x = block * units * thread_blocks modulo
    # items, a block has (x + units * thread_blocks - 1) // items - (x + thread_blocks - 1) // items + 1 owners. x takes
    # on every multiple of the step below items. The first quotient never falls with x, and the second is 0 or 1: the
    # most are where x is the largest of all, or the largest for which the second is 0.
    step = units * math.gcd(blocks, thread_blocks)
    last = items - step
    places = (last, min(last, (items - thread_blocks) // step * step))
    return thread_blocks, max(
        (x + units * thread_blocks - 1) // items - (x + thread_blocks - 1) // items + 1 for x in places
    )


def _room(rows: int, inputs_tiles: int, unit: int, sums_bytes: int, is_grid: bool, device: Device) -> _Room:
    """Place inputs and sums around the table, with inputs of as many tiles as fit, in whole units and equal slices."""
    small = rows * 4 * -(-inputs_tiles // TILE) + 8 * rows  # largest, exponent
    sums = -(-(sums_bytes + small) // 16) * 16

    def slices(space: int) -> tuple[int, int]:
        """Return the tiles of a slice that fits the space, and its bytes; at least a unit."""
        most = max((space // (2 * rows) - 8) // TILE // unit * unit, unit)
        count = -(-inputs_tiles // most)
        tiles = -(-inputs_tiles // count // unit) * unit
        return tiles, rows * (tiles * TILE + 8) * 2

    if not is_grid or not device.aligned_table:
        start = _TABLE if is_grid else 0
        tiles, size = slices(device.shared_bytes - start - sums)
        return _Room(tiles, start, start + size, start + size + sums)
    below, above = _TABLE - _RESERVED, 2 * _TABLE
    tiles, size = slices(below - sums)
    if tiles >= inputs_tiles and size + sums <= below:
        return _Room(tiles, 0, size, above)
    if sums <= below:
        tiles, size = slices(device.shared_bytes - above)
        return _Room(tiles, above, 0, above + size)
    tiles, size = slices(below)
    return _Room(tiles, 0, above, above + sums)


def _clocks(plan: Plan, inputs_tiles: int) -> float:
    """Estimate the time of a plan: constants fitted to measurements on an H200; only their relations matter."""
    shares = WARPS // plan.column_groups
    if plan.ranks > 1:
        segments = -(-plan.blocks // plan.thread_blocks)
        tiles = segments * plan.unit_tiles
    else:
        each = -(-plan.blocks * plan.units // plan.thread_blocks)
        segments = -(-each // plan.units) + (plan.contributions > 1)
        tiles = each * plan.unit_tiles
    steps = max(-(-tiles // (4 * shares)), segments)
    instructions = plan.tiles * 32 * (4.9 + 0.7 * (plan.groups - 1)) + 30  # of a warp and step
    busy = min(WARPS, plan.column_groups * -(-tiles // (4 * segments))) / 4  # warps of a scheduler that have work
    stalls = 1.65 if plan.tiles < 4 else 1.75
    if plan.groups > 1:
        stalls = 1.8 if plan.tiles == 1 else 2.0
    clocks = 4000 + 200 * plan.tiles + steps * instructions * max(busy, 1.6) * stalls + segments * 600
    if plan.contributions > 1:
        clocks += segments * (2000 + 60 * plan.contributions + 80 * plan.rows if plan.ranks > 1 else 4000)
    passes = 1 if inputs_tiles <= plan.slice_tiles else segments
    if plan.prepared:
        start = 5500 if plan.groups == 1 else 3500
        return clocks + start + passes * (400 + plan.rows * inputs_tiles * TILE * 2 / 40)
    rounds = -(-plan.rows * -(-inputs_tiles // TILE) // WARPS)
    return clocks + passes * (600 + rounds * (2700 if plan.rows > 1 else 1000))
