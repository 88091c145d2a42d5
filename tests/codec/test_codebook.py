"""Codebooks: every state of every codebook, against derivations in scalar Python integers."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction
from importlib import resources
from typing import Any

import numpy as np
import pytest

from espalier_format.codec.codebook import CODEBOOKS, EXL3_MARKERS, exl3_codebook, get_codebook, spell_width
from espalier_format.errors import CodebookError, ShapeError

WIDTHS = {
    "e2m1": ["1", "1.5", "2"],
    "int5": ["2.5", "3"],
    "int6": ["3.5", "4"],
    "int8": ["5", "6"],
    "exl3-3inst": ["1", "2", "3", "4", "5", "6", "7", "8"],
    "exl3-mcg": ["1", "2", "3", "4", "5", "6", "7", "8"],
    "exl3-mul1": ["1", "1.5", "2", "2.5", "3", "3.5", "4", "5", "6", "7", "8"],
}
# exl3: (multiplier, addend, CRC-32 of the table as little-endian float16, first eight patterns), from exllamav3.
EXL3 = {
    "exl3-3inst": (89226354, 64248484, 0x4C83D524, "3a25 bb5b 3b74 34b6 3924 2cb0 404f b906"),
    "exl3-mcg": (0xCBAC1FED, 0, 0xD2D13C52, "3f60 304e ba13 3ab8 3952 b75f bea4 bc71"),
    "exl3-mul1": (0x83DCD12D, 0, 0x2BDF05C5, "c2e8 3921 b72d 3239 bb29 b409 bd5e b997"),
}


def frozen_grids() -> dict[str, Any]:
    return json.loads((resources.files("espalier_format.spec") / "grids.json").read_text())


def half(bits: int) -> float:
    return float(struct.unpack("<e", struct.pack("<H", bits))[0])


def exl3_value(family: str, state: int) -> bytes:
    """The float16 of one state, little-endian, with exact sums and struct's rounding."""
    multiplier, addend, _, _ = EXL3[family]
    x = (state * multiplier + addend) % 2**32
    if family == "exl3-mul1":
        byte_sum = sum(x.to_bytes(4, "little"))
        value = (1024 + byte_sum) * Fraction(half(0x1EEE)) + Fraction(half(0xC931))
    else:
        x = (x & 0x8FFF8FFF) ^ 0x3B603B60
        value = Fraction(half(x % 65536)) + Fraction(half(x // 65536))
    exact = float(value)
    assert Fraction(exact) == value
    return struct.pack("<e", exact)


def test_the_list_of_codebooks() -> None:
    assert list(CODEBOOKS) == [f"{family}@{width}" for family, widths in WIDTHS.items() for width in widths]


@pytest.mark.parametrize("name", list(CODEBOOKS))
def test_fields_follow_from_the_name(name: str) -> None:
    codebook = get_codebook(name)
    assert get_codebook(codebook) is codebook
    family, width = name.split("@")
    assert (codebook.name, codebook.family, codebook.width) == (name, family, width)
    assert codebook.bits == float(width)
    assert codebook.half_steps == 2 * float(width)
    assert codebook.halfwords_per_tile == 16 * float(width)
    assert codebook.is_grid == (not family.startswith("exl3"))
    assert codebook.multiplier_hex == "0x" + format(codebook.multiplier, "08x").upper()
    assert codebook.value_scale == (0.5 if family == "e2m1" else 1.0)
    assert codebook.code_dtype == codebook.codes.dtype == (np.int8 if codebook.is_grid else np.float16)
    assert spell_width(codebook.half_steps) == width


@pytest.mark.parametrize("name", [name for name in CODEBOOKS if not name.startswith("exl3")])
def test_every_state_of_a_grid(name: str) -> None:
    family, width = name.split("@")
    grid = frozen_grids()[family]
    table, bits, multiplier = grid["table"], grid["index_bits"], int(grid["widths"][width]["multiplier"], 16)
    expected = bytes(table[(state * multiplier) % 2**32 // 2 ** (32 - bits)] & 0xFF for state in range(65536))
    codebook = get_codebook(name)
    assert codebook.codes.tobytes() == expected
    assert zlib.crc32(expected) == int(grid["widths"][width]["codebook_crc32"], 16)
    assert codebook.multiplier == multiplier
    assert codebook.addend == 0
    assert codebook.index_bits == bits


@pytest.mark.parametrize("family", ["e2m1", "int5", "int6", "int8"])
def test_grid_tables_are_sorted_antisymmetric_and_hashed(family: str) -> None:
    grid = frozen_grids()[family]
    table = grid["table"]
    assert len(table) == 2 ** grid["index_bits"]
    assert table == sorted(table)
    assert [-entry for entry in reversed(table)] == table
    digest = hashlib.sha256(bytes(entry & 0xFF for entry in table)).hexdigest()
    assert digest == grid["table_sha256"]
    assert {codebook.sha256 for codebook in CODEBOOKS.values() if codebook.family == family} == {digest}


def test_e2m1_codes_are_the_doubled_fp4_numbers() -> None:
    fp4 = [sign * magnitude for sign in (1, -1) for magnitude in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
    assert set(get_codebook("e2m1@2").codes.tolist()) == {2 * number for number in fp4}


def test_grids_json_is_the_frozen_file() -> None:
    text = (resources.files("espalier_format.spec") / "grids.json").read_bytes()
    assert hashlib.sha256(text).hexdigest() == "505c49486e7c22f38afde63b636125f8224bb2455911199c26850d77a7b12a6a"


@pytest.mark.parametrize("family", list(EXL3))
def test_every_state_of_an_exl3_codebook(family: str) -> None:
    expected = b"".join(exl3_value(family, state) for state in range(65536))
    multiplier, addend, crc32, first = EXL3[family]
    assert zlib.crc32(expected) == crc32
    assert expected[:16] == b"".join(int(word, 16).to_bytes(2, "little") for word in first.split())
    for codebook in CODEBOOKS.values():
        if codebook.family == family:
            assert codebook.codes.astype("<f2").tobytes() == expected
            assert codebook.sha256 == hashlib.sha256(expected).hexdigest()
            assert (codebook.multiplier, codebook.addend, codebook.index_bits) == (multiplier, addend, 0)


def test_an_unfused_mul1_would_be_wrong() -> None:
    """The specification's warning: rounding the product first changes 60,326 states."""
    sums = np.array([sum((s * 0x83DCD12D % 2**32).to_bytes(4, "little")) for s in range(65536)])
    unfused = (1024 + sums).astype(np.float16) * np.float16(half(0x1EEE)) + np.float16(half(0xC931))
    assert np.count_nonzero(unfused.view(np.uint16) != get_codebook("exl3-mul1@2").codes.view(np.uint16)) == 60326


@pytest.mark.parametrize(
    "name",
    [
        *("e2m1@3", "e2m1@1.0", "int8@4", "E2M1@1", "exl3-mcg@1.5", "exl3-3inst@2.5", "exl3-mul1@4.5", "int4@4"),
        *("", "e2m1", ["e2m1@2"], None, b"e2m1@2", 2),
    ],
)
def test_codebook_error_for_anything_else(name: Any) -> None:
    with pytest.raises(CodebookError):
        get_codebook(name)


def test_codebook_error_for_one_that_differs() -> None:
    with pytest.raises(CodebookError, match="differs from the e2m1@2 of this format version"):
        get_codebook(replace(get_codebook("e2m1@2"), multiplier=1))


def test_exl3_codebook_from_marker_and_rate() -> None:
    assert exl3_codebook(None, 48).name == "exl3-3inst@3"
    assert exl3_codebook("mcg", 128).name == "exl3-mcg@8"
    assert [exl3_codebook("mul1", words).width for words in (16, 24, 32, 40, 56)] == ["1", "1.5", "2", "2.5", "3.5"]
    assert EXL3_MARKERS == {"mcg": 3417055213, "mul1": 2212286765}


@pytest.mark.parametrize("halfwords", [0, 8, 15, 17, 72, 88, 104, 136, 144])
def test_shape_error_for_a_rate_that_does_not_exist(halfwords: int) -> None:
    with pytest.raises(ShapeError):
        exl3_codebook("mul1", halfwords)


@pytest.mark.parametrize("marker", [None, "mcg"])
@pytest.mark.parametrize("halfwords", [24, 40, 56])
def test_codebook_error_for_half_rates_without_mul1(marker: str | None, halfwords: int) -> None:
    with pytest.raises(CodebookError):
        exl3_codebook(marker, halfwords)


def test_codebook_error_for_an_unknown_marker() -> None:
    with pytest.raises(CodebookError):
        exl3_codebook("mul2", 32)


def test_codebooks_cannot_be_changed() -> None:
    codebook = get_codebook("int5@3")
    with pytest.raises(FrozenInstanceError):
        codebook.name = "int5@4"  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        codebook.codes[0] = 1
    with pytest.raises(TypeError):
        CODEBOOKS["int5@4"] = codebook  # type: ignore[index]
    assert codebook.codes is get_codebook("int5@3").codes
    assert len({codebook, get_codebook("int5@3")}) == 1


def test_scale_exponent() -> None:
    for codebook in CODEBOOKS.values():
        assert 2.0**codebook.scale_exponent == codebook.value_scale
    for scale in (0.0, 0.75, 3.0):
        with pytest.raises(CodebookError, match="power of two"):
            _ = replace(get_codebook("e2m1@2"), value_scale=scale).scale_exponent
