"""How the expert bank's kernel is specialised and its work is cut, without a GPU."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from espalier_format.codec.codebook import CODEBOOKS, get_codebook
from espalier_format.errors import UsageError
from espalier_format.kernels.cuda import expert_bank
from espalier_format.kernels.expert_bank_layout import BankGeometry

SHARED_H200, SHARED_RTX = 232448, 101376
"""Shared memory of a block: compute capability 9.0 and 10.0, and 8.6, 8.9 and 12.0."""


def geometry(books: str, blocks: int = 128, hidden: int = 2048, intermediate: int = 512) -> BankGeometry:
    return BankGeometry.read(f"{hidden},{intermediate},{','.join([str(blocks)] * 6)};{books}")


ALL_GRIDS = ",".join(name for name in CODEBOOKS if not name.startswith("exl3"))


@pytest.mark.parametrize("limit", [SHARED_H200, SHARED_RTX])
@pytest.mark.parametrize("blocks", [0, 128, 256])
@pytest.mark.parametrize("books", ["e2m1@1,e2m1@2,int5@3", "exl3-mul1@2", "int8@6", ALL_GRIDS])
def test_every_bank_fits(books: str, blocks: int, limit: int) -> None:
    found = expert_bank.plan(geometry(books, blocks), bfloat=False, shared_limit=limit)
    assert found.shared_bytes <= limit


def test_the_device_code_is_told_what_the_host_asks_for() -> None:
    """It asserts that its struct is no larger; ``test_compile.py`` compiles that."""
    found = expert_bank.plan(geometry("e2m1@1"), bfloat=False, shared_limit=SHARED_H200)
    assert int(found.macros["FIRST_FREE"]) + int(found.macros["SHARED_BYTES"]) == found.shared_bytes
    assert found.macros["ASSIGNMENTS"] == 512


def test_too_little_shared_memory_is_said() -> None:
    with pytest.raises(UsageError):
        expert_bank.plan(geometry(ALL_GRIDS), bfloat=False, shared_limit=48 << 10)


def test_tables_do_not_overlap_and_hold_the_grids() -> None:
    found = expert_bank.plan(geometry(ALL_GRIDS), bfloat=False, shared_limit=SHARED_H200)
    taken = set()
    for text in str(found.macros["TABLES"]).split():
        start, index_bits, spread, copies, stride, address = (int(part) for part in text[6:-1].split(","))
        places = {address + entry * stride + byte for entry in range(1 << spread) for byte in range(4 << copies)}
        assert not places & taken
        assert min(places) >= 1024
        assert max(places) < int(found.macros["FIRST_FREE"])
        taken |= places
        numbers = np.array(found.numbers[start : start + (1 << index_bits)], np.uint16).view(np.float16)
        book = next(book for book in geometry(ALL_GRIDS).codebooks if book.index_bits == index_bits)
        states = np.arange(1 << 16, dtype=np.uint32)
        looked_up = numbers[(states * np.uint32(book.multiplier)) >> np.uint32(32 - index_bits)]
        assert np.array_equal(looked_up, book.codes * np.float16(book.value_scale))


@pytest.mark.parametrize("name", ["e2m1@1.5", "int5@3", "exl3-3inst@2", "exl3-mul1@2.5"])
def test_a_window_given_twice_hashes_like_the_window(name: str) -> None:
    """``lane_tile.cuh`` multiplies s + 2^16 s with another multiplier."""
    multiplier = get_codebook(name).multiplier
    states = np.arange(1 << 16, dtype=np.uint64)
    twice = (states * 65537 * (multiplier * (1 - 65536) % (1 << 32))) % (1 << 32)
    assert np.array_equal(twice, states * multiplier % (1 << 32))


@pytest.mark.parametrize("assignments", [1, 8, 64, 256, 512])
@pytest.mark.parametrize("intermediate", [48, 512, 3072])
def test_work_is_cut_within_limits(assignments: int, intermediate: int) -> None:
    bank = geometry("e2m1@2", intermediate=intermediate)
    found = expert_bank.cut(bank, 256, assignments, 1024, 528)
    for slices, projections in ((found.a_slices, (0, 1)), (found.b_slices, (2,))):
        inputs = max(bank.padded_sizes(each)[0] for each in projections)
        assert -(-inputs // 1024) <= slices <= -(-inputs // 128)
    assert found.a_together in (1, 2, 4)
    assert found.b_together in (1, 2, 4)
    of_a, of_b = (tuple(map(int, part)) for part in np.split(np.array(expert_bank.pieces(bank, found)), 2))
    assert (of_a[0], of_a[2], of_b[0], of_b[2]) == found[:1] + found[2:3] + found[1:2] + found[3:]
    for (slices, chunks, together, tasks), projections in ((of_a, (0, 1)), (of_b, (2,))):
        inputs, outputs = (max(bank.padded_sizes(each)[side] for each in projections) for side in (0, 1))
        assert slices * chunks * 128 >= inputs
        assert chunks * 128 <= 1024
        assert (tasks - 1) * together * 128 < outputs <= tasks * together * 128


def test_down_is_cut_coarsely_sooner() -> None:
    """Measured with 16 tokens."""
    found = expert_bank.cut(geometry("e2m1@2"), 256, 128, 1024, 528)
    assert (found.a_together, found.b_together) == (1, 2)


def test_few_tokens_are_cut_finer() -> None:
    one, many = (expert_bank.cut(geometry("e2m1@2"), 256, assignments, 1024, 528) for assignments in (8, 512))
    assert one.a_slices > many.a_slices
    assert one.b_slices > many.b_slices
