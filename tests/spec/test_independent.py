"""The second opinion itself, against answers that were not made here.

The known answers of EXL3 were written by exllamav3 on a GPU; those of the grids came with the design.
"""

from __future__ import annotations

import json
import struct
import zlib
from fractions import Fraction
from typing import TYPE_CHECKING

import independent as ind
import numpy as np
import pytest
from make_vectors import GRIDS, codebook, tile_halfwords
from safetensors.numpy import load_file

if TYPE_CHECKING:
    from pathlib import Path

# CRC-32 of the 256 states of the tile h[j] = (40503 j + 12345) mod 65536, and of the decoded tile for 3INST, MCG and
# MUL1, from a port of exllamav3's own reader.
PORTED = {
    16: ("7662fa40", "f6d7657a", "c224991f", "db66d975"),
    24: ("944b5a9c", None, None, "29358d9a"),
    32: ("0cc14928", "38d40eea", "96fc911a", "fa102047"),
    40: ("cd242e32", None, None, "6fdb588f"),
    48: ("c40d3fe6", "27a4178e", "2afabe76", "4449a39e"),
    56: ("8f6033d7", None, None, "66ea388a"),
    64: ("b1948730", "5986dbc4", "91a38e6a", "271b44bc"),
    80: ("a766dcec", "49b592c6", "512c6c01", "891e49de"),
    96: ("86fa3adb", "414d117b", "8cfa064b", "6305703b"),
    112: ("84d184d4", "9dee1af1", "959b88f4", "229ccba7"),
    128: ("43eb63ed", "b0df5439", "a5bc8185", "e10fd750"),
}


def crc32(values: list[int]) -> str:
    return f"{zlib.crc32(struct.pack(f'<{len(values)}H', *values)):08x}"


@pytest.mark.parametrize("halfwords", PORTED)
def test_a_tile_as_ported_from_exllamav3(halfwords: int) -> None:
    stored = tile_halfwords(halfwords // 8)
    states = ind.unpack(stored, halfwords // 8)
    assert crc32(states) == PORTED[halfwords][0]
    assert ind.pack(states, halfwords // 8) == stored
    for family, expected in zip(ind.EXL3, PORTED[halfwords][1:], strict=True):
        if expected is not None:
            codes = {ind.tile_position(i): ind.exl3_codes(family)[state] for i, state in enumerate(states)}
            assert crc32([codes[place] for place in sorted(codes)]) == expected


def test_tiles_of_the_design(fixtures: Path) -> None:
    given = json.loads((fixtures / "check_tiles.json").read_text("ascii"))
    assert len(given) == 9
    for name, tile in given.items():
        rows = ind.decode_tiles([[[h & 0xFFFF for h in tile["trellis"]]]], codebook(name))
        assert [code for row in rows for code in row] == tile["codes_row_major"]


def test_codes_of_the_grids_have_the_recorded_crc() -> None:
    for grid, entry in GRIDS.items():
        assert codebook(f"{grid}@{next(iter(entry['widths']))}").sha256 == entry["table_sha256"]
        for width, constants in entry["widths"].items():
            assert f"{zlib.crc32(codebook(f'{grid}@{width}').bytes):08x}" == constants["codebook_crc32"]


@pytest.mark.parametrize("key", ["3inst.k3", "mcg.k2", "mcg.k7", "mul1.k1", "mul1.k1.5", "mul1.k3.5", "mul1.k6"])
def test_known_answers_of_exllamav3(fixtures: Path, key: str) -> None:
    """Codes only, and for each module one block of tiles: the whole is checked with the project's kernels."""
    tensors = load_file(fixtures / "exl3" / "kat.safetensors")
    family, _, width = key.partition(".k")
    trellis = tensors[f"{key}.trellis"].view(np.uint16)
    expected = tensors[f"{key}.expect_inner"].view(np.uint16)
    rows = ind.decode_tiles(trellis[:1, :4].tolist(), codebook(f"exl3-{family}@{width}"))
    assert rows == expected[:16, :64].tolist()


def test_rounding_agrees_with_numpy_where_numpy_is_exact() -> None:
    generator = np.random.default_rng(1)
    doubles = np.ldexp(generator.standard_normal(400), generator.integers(-30, 16, 400))
    for value in [*doubles, 0.0, 65504.0, 65519.99, 2.0**-25, 3 * 2.0**-26, 1 + 2.0**-11]:
        exact = Fraction(float(value))
        assert ind.round_fraction(exact, "float16") == np.float64(value).astype(np.float16).view(np.uint16)
        assert ind.round_fraction(exact, "float32") == np.float64(value).astype(np.float32).view(np.uint32)
        assert ind.round_fraction(exact, "float64") == np.float64(value).view(np.uint64)


def test_both_ways_to_round_to_float16_agree() -> None:
    generator = np.random.default_rng(2)
    for bits, below in ((36, 0), (48, 24), (12, 3), (4, 5)):
        for units in generator.integers(-(2**bits), 2**bits, 100).tolist():
            assert ind.round_float16(units, below) == ind.round_fraction(Fraction(units, 1 << 24 + below), "float16")


def test_rounding_of_roots() -> None:
    """sqrt is correctly rounded in fp64 by IEEE 754, so numpy's is a second opinion."""
    for square in (2, 3, 5, 32, 128, 10**6 + 1):
        assert ind.round_root(False, Fraction(square), "float64") == np.sqrt(np.float64(square)).view(np.uint64)


def test_the_butterfly_is_the_matrix() -> None:
    for block in (32, 64):
        vector = [n * n % 37 for n in range(2 * block)]
        product = [
            sum((-1) ** (i & j).bit_count() * vector[base + j] for j in range(block))
            for base in (0, block)
            for i in range(block)
        ]
        assert ind.hadamard_product(vector, block) == product
