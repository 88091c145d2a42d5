"""Trellis packing, against a derivation on one big integer of stream bits."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier_format.codec.tile import HALFWORDS
from espalier_format.codec.trellis import TILE_POSITION, pack_states, step_bits, unpack_states
from espalier_format.errors import DtypeError, ShapeError, UsageError

# First four states and CRC-32 of all 256 (little-endian uint16, ring order) of the tile h[j] = 40503 j + 12345.
FROM_EXL3 = {
    16: ("ae77 5cef b9de 73bc", 0x7662FA40),
    24: ("91e7 479e 8f3c 3cf3", 0x944B5A9C),
    32: ("eaaf aabc aaf3 abce", 0x0CC14928),
    40: ("b18f 8c79 31e7 8f39", 0xCD242E32),
    48: ("f0de 86f3 379c bce7", 0xC40D3FE6),
    56: ("7e9e e9e7 4f39 f39c", 0x8F6033D7),
    64: ("18bc 8bce bce7 ce70", 0xB1948730),
    80: ("9f79 ef39 e738 e703", 0xA766DCEC),
    96: ("1af3 bce7 39c0 7030", 0x86FA3ADB),
    112: ("ede7 f39c ce06 0303", 0x84D184D4),
    128: ("4bce ce70 7030 3039", 0x43EB63ED),
}


def states_by_recurrence(halfwords: np.ndarray) -> list[int]:
    """States of one tile by shifting new bits in, from the whole ring as one integer."""
    words = [int(word) & 0xFFFF for word in halfwords]
    ring = len(words) * 16
    stream = 0
    for low, high in zip(words[0::2], words[1::2], strict=True):
        stream = (stream << 32) | (high << 16) | low
    small, odd = divmod(ring // 128, 2)
    state, used, states = stream & 0xFFFF, 0, []
    for position in range(256):
        count = small + (odd and position % 2)
        used += count
        new = (stream >> (ring - used)) & ((1 << count) - 1)
        state = ((state << count) | new) & 0xFFFF
        states.append(state)
    assert used == ring
    return states


@pytest.mark.parametrize("width", HALFWORDS)
def test_states_match_exl3(width: int) -> None:
    tile = ((40503 * np.arange(width) + 12345) % 65536).astype(np.uint16)
    states = unpack_states(tile)
    first, crc32 = FROM_EXL3[width]
    assert " ".join(f"{state:04x}" for state in states[:4]) == first
    assert zlib.crc32(states.astype("<u2").tobytes()) == crc32


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(HALFWORDS), st.integers(0, 2**32))
def test_unpack_equals_the_recurrence_and_pack_undoes_it(width: int, seed: int) -> None:
    tiles = np.random.default_rng(seed).integers(-32768, 32768, (2, width)).astype(np.int16)
    states = unpack_states(tiles)
    assert states.dtype == np.uint16
    assert states.tolist() == [states_by_recurrence(tile) for tile in tiles]
    packed = pack_states(states, width // 8)
    assert packed.dtype == np.int16
    assert np.array_equal(packed, tiles)


def test_leading_dimensions_and_strides_do_not_matter() -> None:
    tiles = np.random.default_rng(0).integers(-32768, 32768, (3, 4, 48)).astype(np.int16)
    states = unpack_states(tiles)
    assert states.shape == (3, 4, 256)
    assert np.array_equal(unpack_states(tiles.view(np.uint16)), states)
    assert np.array_equal(unpack_states(tiles.transpose(1, 0, 2)[::2]), states.transpose(1, 0, 2)[::2])
    assert np.array_equal(pack_states(states.astype(np.int64), 6), tiles)
    assert unpack_states(tiles[:0]).shape == (0, 4, 256)
    assert pack_states(states[:0], 6).shape == (0, 4, 48)


def test_step_bits() -> None:
    assert step_bits(6).tolist() == [3] * 256
    assert step_bits(5).tolist() == [2, 3] * 128


def test_tile_position() -> None:
    first = [0, 16, 128, 144, 8, 24, 136, 152, 32, 48, 160, 176, 40, 56, 168, 184]
    assert TILE_POSITION[:16].tolist() == first
    assert sorted(TILE_POSITION.tolist()) == list(range(256))
    by_bits = [16 * (2 * (i // 8 % 4) + i % 2 + 8 * (i // 2 % 2)) + i // 32 + 8 * (i // 4 % 2) for i in range(256)]
    assert TILE_POSITION.tolist() == by_bits


@pytest.mark.parametrize("width", HALFWORDS)
def test_states_that_are_no_path_are_refused(width: int) -> None:
    tile = np.random.default_rng(width).integers(-32768, 32768, width).astype(np.int16)
    states = unpack_states(tile)
    kept = width // 16  # bits below are stored, the ones above must agree with the predecessors
    for position, bit in ((0, 15), (100, kept + 1), (255, 15)):
        broken = states.copy()
        broken[position] ^= np.uint16(1 << bit)
        with pytest.raises(UsageError, match="tail-biting"):
            pack_states(broken, width // 8)
    with pytest.raises(UsageError, match="tail-biting"):
        pack_states(np.roll(states, 1) ^ np.uint16(1), width // 8)


def test_only_sixteen_bit_integers_are_packed() -> None:
    states = np.zeros(256, np.int64)
    states[7] = 65536
    for bad in (states, -states, np.zeros(256), np.zeros(256, bool)):
        with pytest.raises(UsageError):
            pack_states(bad, 4)
    for shape in ((), (255,), (256, 2)):
        with pytest.raises(ShapeError):
            pack_states(np.zeros(shape, np.uint16), 4)
    for half_steps in (0, 1, 9, 11, 13, 15, 17, -2):
        with pytest.raises(UsageError):
            pack_states(np.zeros(256, np.uint16), half_steps)


def test_only_packed_tiles_are_unpacked() -> None:
    for dtype in (np.int32, np.float16, np.uint8, ">i2"):
        with pytest.raises(DtypeError):
            unpack_states(np.zeros((1, 1, 32), dtype))
    for shape in ((), (0,), (1, 17), (1, 8), (1, 72), (32, 1)):
        with pytest.raises(ShapeError):
            unpack_states(np.zeros(shape, np.int16))
