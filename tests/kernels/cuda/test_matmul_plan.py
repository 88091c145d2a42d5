"""How products are cut up: every weight is multiplied once, within what a device has. And that the kernel compiles.

The arithmetic of the kernel's ``Cut`` is repeated here. Not checked: that a plan is the fastest one.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier_format.codec.codebook import CODEBOOKS, Codebook, get_codebook
from espalier_format.codec.rotation import BLOCKS, padded
from espalier_format.errors import UsageError

pytest.importorskip("torch")
from espalier_format.kernels.cuda import matmul
from espalier_format.kernels.cuda.compiler import compile_text, kernel_source
from espalier_format.kernels.cuda.matmul_plan import WARPS, Device, Plan, _divide, candidates, make_plan

H200 = Device(multiprocessors=132, shared_bytes=232448)
MIDDLE = Device(multiprocessors=108, shared_bytes=166912)
SMALL = Device(multiprocessors=28, shared_bytes=101376)


def shares(plan: Plan, k_tiles: int) -> dict[tuple[int, int], list[tuple[int, int, int]]]:
    """Which (block, first tile, end) each thread block (x, y) takes, by the kernel's rules."""
    found = {}
    for x, y in itertools.product(range(plan.ranks), range(plan.thread_blocks)):
        if plan.ranks > 1:
            first = min(x * plan.unit_tiles, k_tiles)
            blocks = range(y, plan.blocks, plan.thread_blocks)
            found[x, y] = [(block, first, min(first + plan.unit_tiles, k_tiles)) for block in blocks]
        else:
            items = plan.blocks * plan.units
            begin, end = items * y // plan.thread_blocks, items * (y + 1) // plan.thread_blocks
            found[x, y] = []
            for block in range(begin // plan.units, -(-end // plan.units)):
                first = max(begin - block * plan.units, 0) * plan.unit_tiles
                last = min(end - block * plan.units, plan.units) * plan.unit_tiles
                found[x, y].append((block, first, min(last, k_tiles)))
    return found


def check_room(plan: Plan, codebook: Codebook) -> None:
    """Inputs, sums, words and table of the kernel lie apart, wherever below 1 KiB a block's shared memory begins."""
    inputs = plan.input_sets * plan.rows * (plan.slice_tiles * 16 + 8) * 2
    sums = plan.sum_sets * plan.buffers * plan.rows * (plan.width + 4) * 4
    sums += plan.rows * 4 * -(-plan.slice_tiles // 16) + 8 * plan.rows
    sums = -(-sums // 8) * 8 + 2 * plan.sum_sets * 8  # two barriers of eight bytes for each set, at a multiple of eight
    regions = [(plan.inputs_at, plan.inputs_at + inputs), (plan.sums_at, plan.sums_at + sums)]
    if plan.staged:
        # Of each warp two stages of four rows, which begin in banks 8 apart.
        length = plan.tiles * codebook.halfwords_per_tile * 2
        row = next(size for size in itertools.count(length) if size % 128 == 32)
        regions.append((plan.words_at, plan.words_at + WARPS * 2 * 4 * row))
        assert plan.words_at % 16 == 0
    if codebook.is_grid:
        # int6: 2^17 bytes. int8: (33 * 4095) // 128 + 1 rows. The table is at 1024 in the address space.
        size = {9: 1 << 17, 12: 1056 * 128}[codebook.index_bits] if plan.wide_table else 65536
        regions.append((0, 1024 + size))
    ordered = sorted(regions)
    assert ordered[0][0] >= 0
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ordered))
    assert ordered[-1][1] <= plan.shared_bytes
    assert plan.inputs_at % 16 == 0
    assert plan.sums_at % 16 == 0


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(list(CODEBOOKS)),
    rotation=st.tuples(st.sampled_from(BLOCKS), st.sampled_from(BLOCKS)),
    size=st.tuples(st.integers(1, 9000), st.integers(1, 9000)),
    rows=st.integers(1, 64),
    device=st.sampled_from([H200, SMALL, MIDDLE]),
)
def test_every_weight_once(
    name: str, rotation: tuple[int, int], size: tuple[int, int], rows: int, device: Device
) -> None:
    rows = min(rows, device.max_rows)
    k_tiles, n_tiles = (padded(features, block) // 16 for features, block in zip(size, rotation, strict=True))
    plans = list(candidates(get_codebook(name), *rotation, k_tiles, n_tiles, rows, device))
    assert make_plan(get_codebook(name), *rotation, k_tiles, n_tiles, rows, device) in plans
    for plan in plans:
        assert plan.shared_bytes <= device.shared_bytes
        assert plan.ranks * plan.thread_blocks <= device.multiprocessors or plan.thread_blocks == 1
        assert (plan.blocks * plan.units + 1) * plan.thread_blocks < 2**32
        assert plan.width % max(rotation[1], 16) == 0
        assert (plan.blocks - 1) * plan.width < n_tiles * 16 <= plan.blocks * plan.width
        assert WARPS % plan.column_groups == 0
        assert 1 <= plan.buffers <= WARPS // plan.column_groups
        assert all(n & (n - 1) == 0 for n in (plan.buffers, plan.column_groups))
        assert plan.sum_sets in {1, 2, 4}
        assert plan.input_sets == 1 or (plan.prepared and plan.input_sets == 2)
        assert plan.slice_tiles % 4 == 0
        assert plan.slice_tiles * 16 % max(rotation[0], 1) == 0
        assert plan.unit_tiles * 16 % max(rotation[0], 64) == 0
        check_room(plan, get_codebook(name))
        taken: dict[int, list[tuple[int, int]]] = {}
        for part in shares(plan, k_tiles).values():
            for block, first, end in part:
                assert first < end
                taken.setdefault(block, []).append((first, end))
        assert sorted(taken) == list(range(plan.blocks))
        for parts in taken.values():
            ordered = sorted(parts)
            assert ordered[0][0] == 0
            assert ordered[-1][1] == k_tiles
            assert all(before[1] == after[0] for before, after in itertools.pairwise(ordered))
        assert max(Counter({block: len(parts) for block, parts in taken.items()}).values()) <= plan.contributions


@settings(max_examples=300, deadline=None)
@given(blocks=st.integers(1, 90), units=st.integers(1, 60), multiprocessors=st.integers(1, 150))
def test_contributions(blocks: int, units: int, multiprocessors: int) -> None:
    """The most thread blocks of a block of columns, against the owner of every item."""
    thread_blocks, contributions = _divide(blocks, units, 1, multiprocessors)
    items = blocks * units
    assert thread_blocks == min(multiprocessors, items)
    owners = [((item + 1) * thread_blocks - 1) // items for item in range(items)]
    most = max(owners[start + units - 1] - owners[start] + 1 for start in range(0, items, units))
    assert contributions == most


def test_large_weights() -> None:
    """A plan is made at once, of those whose numbers fit 32 bits; where none is left, that is said."""
    codebook = get_codebook("int5@3")
    start = time.perf_counter()
    make_plan.__wrapped__(codebook, 128, 128, 65536 // 16, 524288 // 16, 1, H200)
    assert time.perf_counter() - start < 0.2
    large = (1 << 20) // 16
    plans = list(candidates(codebook, 128, 128, large, large * 8, 1, H200))
    assert plans
    assert all((plan.blocks * plan.units + 1) * plan.thread_blocks < 2**32 for plan in plans)
    assert max(plan.units for plan in plans) < large // 8  # the plan of single units is left out
    with pytest.raises(UsageError, match="too large"):
        make_plan(codebook, 128, 128, 2**22, 8, 64, H200)
    with pytest.raises(UsageError, match="too large"):
        make_plan(codebook, 128, 128, 8, 2**28 + 2**10, 1, Device(multiprocessors=132, shared_bytes=232448))


@pytest.mark.parametrize("shared_bytes", [200 << 10, 227 << 10])
@pytest.mark.parametrize("name", ["int5@3", "int6@4", "int8@6"])
def test_long_inputs(name: str, shared_bytes: int) -> None:
    """What does not fit with the larger table, or with staged words, is left out; another plan is there."""
    codebook, device = get_codebook(name), Device(multiprocessors=132, shared_bytes=shared_bytes)
    for rotation, rows in itertools.product((0, 128, 256), (1, 8, 64)):
        for k in (22528, 1 << 18, 1 << 19):
            plan = make_plan(codebook, rotation, 128, k // 16, 8, rows, device)
            assert plan.shared_bytes <= shared_bytes
            check_room(plan, codebook)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CODEBOOKS))
def test_compiles_for_every_codebook(name: str) -> None:
    """Each with the number of rows and tiles of some plan; all of them are compiled by the tests on a GPU."""
    codebook = get_codebook(name)
    rows = 1 + 9 * list(CODEBOOKS).index(name) % 64
    plan = make_plan(codebook, 128, 128, 256, 256, rows, H200)
    macros = matmul.kernel_macros(codebook, plan.groups, rows == 1, plan.tiles, plan.wide_table, plan.staged)
    cubin, remarks = compile_text(kernel_source("matmul"), "matmul", macros, "sm_90")
    assert b"matmul" in cubin
    assert remarks == ""
