"""How a product is cut into thread blocks: chosen from shape, width, rows and device alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple

from espalier_format.codec.codebook import Codebook
from espalier_format.codec.tile import TILE
from espalier_format.errors import UsageError

_TABLE: Final = 65536
_WIDE_TABLES: Final = {"int6": 131072, "int8": 135168}
"""Bytes of the tables that `Plan.wide_table` is about."""
_STAGED: Final = ("int5", "int6", "int8")
"""Codebooks with which words can be staged: the look-ups of the others leave the pipe of shared memory time enough."""
_RESERVED: Final = 1024
"""Shared memory that a thread block may have below its own: the table begins behind it, whether it is there or not."""
_SUMS_SHARE: Final = 6
"""Of the shared memory, the buffers of sums should not exceed this part, a sixth."""
_LEAST_IN_TURN: Final = 48
"""Tiles of k from which on two slices in turn, of which one is copied while the other is used, are better than one."""
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
    def max_rows(self) -> int:
        """The most rows of one launch: what has to be in shared memory at once fits."""
        return 64 if self.shared_bytes >= 200 << 10 else 32 if self.shared_bytes >= 160 << 10 else 16


@dataclass(frozen=True, slots=True)
class Plan:
    """How one product is cut up; ``matmul.cu`` says what the parts are."""

    rows: int
    groups: int
    tiles: int
    column_groups: int
    buffers: int
    sum_sets: int
    """Sets of buffers of sums, 1, 2 or 4."""
    input_sets: int
    """Slices of prepared inputs that there is room for, 1 or 2."""
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
    words_at: int
    shared_bytes: int
    staged: bool
    """Whether words of the weight are copied to shared memory before they are read."""
    wide_table: bool
    """Whether the table of the grid is the larger one of ``codebook_tables.cuh``, for quick look-ups."""
    prepared: bool
    """Whether a kernel of its own rotates the inputs."""
    microseconds: float
    """Estimated, for an H200."""

    @property
    def width(self) -> int:
        """Columns of a block."""
        return self.column_groups * self.tiles * TILE


class _Room(NamedTuple):
    """Where things lie in shared memory, in bytes from its start."""

    slice_tiles: int
    input_sets: int
    inputs_at: int
    buffers: int
    sum_sets: int
    sums_at: int
    words_at: int
    end: int


@lru_cache(maxsize=4096)
def make_plan(
    codebook: Codebook, rotation_in: int, rotation_out: int, k_tiles: int, n_tiles: int, rows: int, device: Device
) -> Plan:
    """Choose how a product of 1 to ``device.max_rows`` rows is cut up; the same arguments give the same plan.

    Raises UsageError for a weight that is too large in every plan: for the kernel's 32-bit arithmetic, or with inputs
    too long for the device's shared memory.
    """
    possible = candidates(codebook, rotation_in, rotation_out, k_tiles, n_tiles, rows, device)
    best = min(possible, key=lambda plan: plan.microseconds, default=None)
    if best is None:
        raise UsageError(
            "the weight is too large to be multiplied by one kernel", got=f"{n_tiles * TILE} x {k_tiles * TILE}"
        )
    return best


def candidates(
    codebook: Codebook, rotation_in: int, rotation_out: int, k_tiles: int, n_tiles: int, rows: int, device: Device
) -> Iterator[Plan]:
    """Yield the plans that are possible: all numbers of the kernel's ``Cut`` fit 32 bits, and its data the device."""
    groups = next(groups for groups in (1, 2, 4, 8) if 8 * groups >= rows)
    width = max(128, rotation_out)
    blocks = -(-n_tiles * TILE // width)
    unit = max(rotation_in, 64) // TILE
    # Two kinds of table: one is quicker, with the other there is more room for inputs.
    tables = [_TABLE if codebook.is_grid else 0]
    if has_wide_table(codebook, groups, device):
        tables.append(_WIDE_TABLES[codebook.family])
    all_units = -(-k_tiles // unit)
    cuts = [(1, all_units), (1, 1), *((ranks, ranks) for ranks in range(2, min(_MOST_RANKS, all_units) + 1))]
    for tiles in possible_tiles(codebook, groups):
        for ranks, parts in cuts:
            unit_tiles = -(-all_units // parts) * unit
            units = -(-k_tiles // unit_tiles)
            if ranks > 1 and units != ranks:
                continue
            thread_blocks, contributions = _divide(blocks, units, ranks, device.multiprocessors)
            if (blocks * units + 1) * thread_blocks >= 1 << 32:
                continue
            inputs = unit_tiles if ranks > 1 else -(-k_tiles // 4) * 4
            for table, prepared, staged in itertools.product(
                tables, (False, True)[: 1 + (rows > 1)], (False, True)[: 1 + has_stages(codebook, groups, device)]
            ):
                words = stage_bytes(codebook, tiles) if staged else 0
                room = _room(rows, inputs, unit, width, WARPS * TILE * tiles // width, table, words, prepared, device)
                if room is None:
                    continue
                plan = Plan(
                    rows=rows, groups=groups, tiles=tiles, column_groups=width // (TILE * tiles), buffers=room.buffers,
                    sum_sets=room.sum_sets, input_sets=room.input_sets, ranks=ranks, thread_blocks=thread_blocks,
                    blocks=blocks, units=units, unit_tiles=unit_tiles, contributions=contributions,
                    slice_tiles=room.slice_tiles, inputs_at=room.inputs_at, sums_at=room.sums_at,
                    words_at=room.words_at, shared_bytes=room.end, staged=staged, wide_table=table > _TABLE,
                    prepared=prepared, microseconds=0.0,
                )  # fmt: skip
                yield replace(plan, microseconds=_microseconds(plan, codebook, inputs))


def possible_tiles(codebook: Codebook, groups: int) -> tuple[int, ...]:
    """Return what `Plan.tiles` can be: a run of the stream is of whole words, and sums and words fit the registers."""
    least = 1 + codebook.half_steps % 2
    few = groups == 2 or codebook.half_steps >= 10 or codebook.family in _STAGED
    most = least if groups > 2 else 2 if few else 4
    return tuple(tiles for tiles in (1, 2, 4) if least <= tiles <= most)


def has_wide_table(codebook: Codebook, groups: int, device: Device) -> bool:
    """Tell whether a codebook has a larger table, and a device room for it beside inputs and sums of so many rows."""
    return codebook.family in _WIDE_TABLES and groups <= 4 and device.shared_bytes >= 200 << 10


def has_stages(codebook: Codebook, groups: int, device: Device) -> bool:
    """Tell whether words of a codebook can be staged, and a device has room for it beside the rest."""
    return codebook.family in _STAGED and groups == 1 and device.shared_bytes >= 200 << 10


def stage_bytes(codebook: Codebook, tiles: int) -> int:
    """Return the bytes of the stages of all warps, as ``tile_stream.cuh`` has them: two each, of four padded rows."""
    row = (tiles * codebook.half_steps * 16 + 95) // 128 * 128 + 32
    return WARPS * 2 * 4 * row


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


def _room(
    rows: int, inputs_tiles: int, unit: int, width: int, shares: int, table: int, words: int, prepared: bool,
    device: Device,
) -> _Room | None:  # fmt: skip
    """Place inputs, sums and stages of so many bytes of words behind a table of so many bytes, if there is room.

    Inputs are there in whole, equal slices, of as many tiles as fit. What that leaves goes to more buffers of sums, of
    which each share of the warps can have one, and to more sets of them.
    """
    buffers = shares
    while buffers > 1 and buffers * rows * (width + 4) * 4 > device.shared_bytes // _SUMS_SHARE:
        buffers //= 2
    rooms = []
    while buffers:
        for sum_sets in (4, 2, 1):
            size = sum_sets * buffers * rows * (width + 4) * 4
            size += rows * 4 * -(-inputs_tiles // TILE) + 8 * rows + 16 * sum_sets + 8  # largest, exponent, barriers
            start = table + _RESERVED if table else 0
            space = device.shared_bytes - start - -(-size // 16) * 16 - words
            tiles, input_sets = _slice(space, inputs_tiles, rows, unit), 1
            if prepared and tiles < inputs_tiles:
                half = _slice(space // 2, inputs_tiles, rows, unit)
                if half >= _LEAST_IN_TURN:
                    tiles, input_sets = half, 2
            sums_at = start + input_sets * rows * (tiles * TILE + 8) * 2
            words_at = sums_at + -(-size // 16) * 16
            room = _Room(tiles, input_sets, start, buffers, sum_sets, sums_at, words_at, words_at + words)
            if room.end <= device.shared_bytes:
                rooms.append(room)
        buffers //= 2

    def worth(room: _Room) -> tuple[bool, int, int, int]:
        return room.slice_tiles >= inputs_tiles, room.slice_tiles * room.input_sets, room.buffers, room.sum_sets

    return max(rooms, key=worth, default=None)


def _slice(space: int, inputs_tiles: int, rows: int, unit: int) -> int:
    """Return the tiles of slices of inputs that fit so many bytes, in whole units, or one unit if none fits."""
    most = max((space // (2 * rows) - 8) // TILE // unit * unit, unit)
    return -(-inputs_tiles // -(-inputs_tiles // most) // unit) * unit


# ---- estimates: of all constants, fitted to measurements on an H200, only the relations matter ---------------------

_DECODING: Final = {"e2m1": 0.099, "int5": 0.636, "int6": 0.577, "int8": 2.051}
"""Microseconds that 1000 weights of a lane in each warp of a scheduler take more than those of EXL3."""
_DECODING_SMALL: Final = {"int6": 1.212, "int8": 6.152}
"""The same, where there is a wide table and it is not used."""
_DECODING_STAGED: Final = {"int5": -0.21, "int6": -0.34, "int8": -0.49}
"""What staged words change of that."""
_MULTIPLYING: Final = {
    (0, 1): 0.173, (0, 2): 1.579, (0, 4): 2.45, (1, 1): 0.173, (1, 2): 1.579, (1, 4): 2.625,
    (2, 1): 0.854, (2, 2): 2.62, (4, 1): 1.803, (4, 2): 4.0, (8, 1): 8.048, (8, 2): 20.0,
}  # fmt: skip
"""Microseconds for 1000 weights as before, by groups (0: one row) and tiles; without what a step takes with any
number of tiles."""


def _microseconds(plan: Plan, codebook: Codebook, inputs_tiles: int) -> float:
    """Estimate the time of a plan, given how many tiles of k have inputs that a thread block needs."""
    split = plan.contributions > 1
    if plan.ranks > 1:
        segments = -(-plan.blocks // plan.thread_blocks)  # blocks of columns that a thread block has a part of
        tiles = segments * plan.unit_tiles
    else:
        each = -(-plan.blocks * plan.units // plan.thread_blocks)
        segments = -(-each // plan.units) + split
        tiles = each * plan.unit_tiles
    shares = WARPS // plan.column_groups
    steps = max(-(-tiles // (4 * shares)), segments)  # of a warp
    busy = max(min(WARPS, plan.column_groups * -(-tiles // (4 * segments))) / 4, 1)  # warps of a scheduler
    slow = codebook.family in _WIDE_TABLES and not plan.wide_table
    decoding = (_DECODING_SMALL if slow else _DECODING).get(codebook.family, 0.0)
    if plan.staged:
        decoding += _DECODING_STAGED[codebook.family]
    weights = decoding + _MULTIPLYING[plan.groups * (plan.rows > 1), plan.tiles] + 4.227 / plan.tiles
    rounds = -(-plan.rows // WARPS)
    time = 0.512 + 0.12 * plan.tiles + 0.4 * plan.staged + steps * plan.tiles * 0.032 * busy * weights
    time += segments * ((1.0 if plan.groups == 1 else 2.138) + 0.0113 * plan.rows * shares)
    if split:
        exchange = 0.533 + 0.103 * rounds * (plan.contributions + 4)
        time += exchange * (segments if plan.ranks > 1 else 1)
    slices = -(-inputs_tiles // plan.slice_tiles)
    # Slices that come to be in shared memory. The first and the last block of columns can be needed in part only.
    passes = 1 if slices == 1 else min(slices * segments, -(-tiles // plan.slice_tiles) + segments - 1)
    if plan.prepared:
        copied = plan.rows * plan.slice_tiles * TILE * 2 * (passes if plan.input_sets == 1 else 1)
        return time + 2.355 + 0.0229 * copied / 1000 + 1.715 * (passes - 1)
    tasks = -(-plan.rows * -(-inputs_tiles // slices // TILE) // WARPS)  # of a warp
    per_task = 1.072 if plan.rows == 1 else 1.297
    return time + passes * (0.066 + 1.305 * (plan.groups > 1) + per_task * tasks)
