"""Every number on the codebook pages of spec/ is read from the page and computed again.

Not checked: prose, that is whether a sentence follows from another.
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from fractions import Fraction

import independent as ind
import numpy as np
import pytest
from make_vectors import GRIDS, codebook
from pages import (
    PAGES,
    code,
    flat,
    integers,
    number,
    sections,
    table,
    tables,
    text,
    words,
)

GRID_NAMES = list(GRIDS)
EXL3_NAMES = list(ind.EXL3)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# --- codebook-<grid>.md ----------------------------------------------------------------------------


def grid_table(page: str) -> list[int]:
    """The table as the page prints it: in lines of sixteen, or the lower half in run lengths."""
    rows = table(page, "3")
    if "×" not in rows[0][0]:
        assert [int(row[0]) for row in rows] == list(range(0, 16 * len(rows), 16))
        return [entry for row in rows for entry in integers(row[1])]
    lower = []
    for run in " ".join(row[0] for row in rows).split():
        value, count = integers(run.replace("×", " "))
        lower += [value] * count
    return lower + [-value for value in reversed(lower)]


@pytest.mark.parametrize("grid", GRID_NAMES)
def test_grid_page(grid: str) -> None:
    page, entry = f"codebook-{grid}.md", GRIDS[grid]
    bits, entries = entry["index_bits"], entry["table"]
    assert grid_table(page) == entries
    assert entries == sorted(entries)
    assert entries == [-value for value in reversed(entries)]
    stated = {row[0]: row[1] for row in table(page, "1")}
    assert stated["codebook names"] == ", ".join(f"`{grid}@{width}`" for width in entry["widths"])
    assert int(stated["index bits *b*"]) == bits
    assert int(stated["entries of the table"]) == len(entries) == 2**bits
    assert {"½": 0.5, "1": 1}[stated["value_scale"]] == entry["value_scale"]
    assert [number(n) for n in stated["smallest and largest code"].split(" and ")] == [min(entries), max(entries)]
    assert int(stated["distinct codes"]) == len(set(entries))
    assert code(stated["SHA-256 of the table"]) == sha256(struct.pack(f"<{len(entries)}b", *entries))
    formula = sections(page)["2"]
    assert f">> (32 − {bits}) ]" in formula
    assert f"value(s) = code(s) · {stated['value_scale']}\n" in formula
    assert f"TABLE[{len(entries) - 1} − i] = −TABLE[i]" in sections(page)["3"]
    assert f"is over {len(entries)} bytes" in flat(sections(page)["3"])


@pytest.mark.parametrize("grid", GRID_NAMES)
def test_codes_on_the_grid_page(grid: str) -> None:
    rows = table(f"codebook-{grid}.md", "2")
    assert [code(row[0]) for row in rows] == [f"{grid}@{width}" for width in GRIDS[grid]["widths"]]
    for name, multiplier, crc, first, last in rows:
        book = codebook(code(name))
        assert multiplier == f"0x{book.multiplier:08X}"
        assert crc == f"{zlib.crc32(book.bytes):08x}"
        assert (integers(first), integers(last)) == (book.codes[:8], book.codes[-8:])


@pytest.mark.parametrize("grid", GRID_NAMES)
def test_worked_lookups_on_the_grid_page(grid: str) -> None:
    rows = table(f"codebook-{grid}.md", "4")
    assert {code(row[0]) for row in rows} == {f"{grid}@{width}" for width in GRIDS[grid]["widths"]}
    for name, state, product, index, stored, value in rows:
        book = codebook(code(name))
        s = int(state, 16)
        assert product == f"0x{s * book.multiplier % 2**32:08x}"
        assert int(index) == s * book.multiplier % 2**32 // 2 ** (32 - GRIDS[grid]["index_bits"])
        assert number(stored) == GRIDS[grid]["table"][int(index)] == book.codes[s]
        assert number(value) == book.value(book.codes[s])


def test_ranges_that_the_introductions_name() -> None:
    """Signed five, six and eight bits hold the codes; FP8 E4M3 has four significand bits."""

    def in_e4m3(value: int) -> bool:
        return abs(value) <= 448 and value % 2 ** max(0, abs(value).bit_length() - 4) == 0

    for grid, bits in (("int5", 5), ("int6", 6), ("int8", 8)):
        assert max(GRIDS[grid]["table"]) < 2 ** (bits - 1)
    assert all(map(in_e4m3, GRIDS["int5"]["table"]))
    assert {v for v in GRIDS["int6"]["table"] if not in_e4m3(v)} == {
        v for v in GRIDS["int6"]["table"] if abs(v) > 16 and v % 2
    }
    magnitudes = [Fraction(n) for n in ["0", "1/2", "1", "3/2", "2", "3", "4", "6"]]
    assert {abs(Fraction(v, 2)) for v in GRIDS["e2m1"]["table"]} == set(magnitudes)
    assert "0, ½, 1, 1½, 2, 3, 4, 6 and their negatives" in text("codebook-e2m1.md")


# --- codebook-exl3.md ------------------------------------------------------------------------------


def test_exl3_constants() -> None:
    rows = table("codebook-exl3.md", "1")
    assert [code(row[0]) for row in rows] == EXL3_NAMES
    for family, widths, multiplier, addend, marker in rows:
        known = [name.split("@")[1] for name in ind.codebook_names(GRIDS) if name.startswith(code(family))]
        assert widths.split(", ") == known
        assert int(multiplier, 16) == ind.EXL3[code(family)][0]
        assert (0 if addend == "–" else int(addend, 16)) == ind.EXL3[code(family)][1]
        assert code(marker) == {"exl3-3inst": "none"}.get(code(family), code(family)[5:])


def test_exl3_hashes_and_codes() -> None:
    hashes, codes = tables(sections("codebook-exl3.md")["4"])
    assert [code(row[0]) for row in hashes] == [code(row[0]) for row in codes] == EXL3_NAMES
    for (family, sha, crc), (_, first, last) in zip(hashes, codes, strict=True):
        all_codes = ind.exl3_codes(code(family))
        data = struct.pack("<65536H", *all_codes)
        assert len(data) == 131_072
        assert (code(sha), crc) == (sha256(data), f"{zlib.crc32(data):08x}")
        assert (words(first), words(last)) == (all_codes[:8], all_codes[-8:])


def test_exl3_properties() -> None:
    for family, least, largest, distinct, zeros in table("codebook-exl3.md", "5"):
        codes = ind.exl3_codes(code(family))
        values = [ind.float16(c) for c in codes]
        assert (number(least), number(largest)) == (min(values), max(values))
        assert (int(distinct), int(zeros)) == (len(set(codes)), values.count(Fraction(0)))
        assert 0x8000 not in codes
        assert all((value * 2**18).denominator == 1 and abs(value) < 4 for value in values)
    assert "multiple of 2^−18 and smaller than 4" in flat(sections("codebook-exl3.md")["5"])


def test_mul1_with_two_roundings_is_wrong_where_the_page_says() -> None:
    body = flat(sections("codebook-exl3.md")["3"])
    wrong = 0
    for state, expected in enumerate(ind.exl3_codes("exl3-mul1")):
        total = sum((state * 0x83DCD12D % 2**32).to_bytes(4, "little"))
        product = ind.round_float16(ind.float16_units(0x6400 + total) * ind.float16_units(0x1EEE), below=24)
        wrong += ind.round_float16(ind.float16_units(product) + ind.float16_units(0xC931)) != expected
        assert ind.float16(0x6400 + total) == 1024 + total
    assert f"in fp16, {wrong} of the 65,536 codes come out wrong" in body
    assert "fp16(0x1EEE) = 0.00676727294921875 and fp16(0xC931) = −10.3828125" in body
    assert (float(ind.float16(0x1EEE)), float(ind.float16(0xC931))) == (0.00676727294921875, -10.3828125)
    assert "0 ≤ b ≤ 1020" in body
    assert 4 * 255 == 1020


def test_operands_of_3inst_and_mcg_are_as_large_as_the_page_says() -> None:
    assert "a magnitude of at least 0.125 and below 2" in flat(sections("codebook-exl3.md")["2"])
    for family in EXL3_NAMES[:2]:
        multiplier, addend = ind.EXL3[family]
        for state in range(65536):
            x = (state * multiplier + addend) % 2**32 & 0x8FFF8FFF ^ 0x3B603B60
            assert all(0.125 * 2**24 <= abs(ind.float16_units(half)) < 2 * 2**24 for half in (x & 0xFFFF, x >> 16))


def test_shortcuts_that_the_page_allows() -> None:
    """fp32 and fp64 sums for 3INST and MCG, an fp64 product and sum for MUL1, each rounded to fp16 once."""
    states = np.arange(65536, dtype=np.uint32)
    for family, (multiplier, addend) in ind.EXL3.items():
        x = states * np.uint32(multiplier) + np.uint32(addend)
        expected = np.array(ind.exl3_codes(family), dtype=np.uint16)
        if family == "exl3-mul1":
            h = (x.view(np.uint8).reshape(-1, 4).sum(axis=1) + 0x6400).astype(np.uint16).view(np.float16)
            slope, offset = np.array([0x1EEE, 0xC931], dtype=np.uint16).view(np.float16).astype(np.float64)
            assert ((h * slope + offset).astype(np.float16).view(np.uint16) == expected).all()
        else:
            halves = ((x & 0x8FFF8FFF) ^ 0x3B603B60).view(np.uint16).view(np.float16).reshape(-1, 2)
            for wide in (np.float32, np.float64):
                sums = halves.astype(wide).sum(axis=1, dtype=wide)
                assert (sums.astype(np.float16).view(np.uint16) == expected).all()


def test_worked_lookups_of_exl3() -> None:
    hashed, summed = tables(sections("codebook-exl3.md")["6"])
    assert {code(row[0]) for row in [*hashed, *summed]} == set(EXL3_NAMES)
    for family, state, before, after, operands, pattern, value in hashed:
        s = int(state, 16)
        multiplier, addend = ind.EXL3[code(family)]
        x = (s * multiplier + addend) % 2**32
        assert before == f"0x{x:08x}"
        masked = (x & 0x8FFF8FFF) ^ 0x3B603B60
        assert after == f"0x{masked:08x}"
        low, high = map(number, operands.split(" + "))
        assert (low, high) == (ind.float16(masked & 0xFFFF), ind.float16(masked >> 16))
        assert int(pattern, 16) == ind.exl3_codes(code(family))[s]
        assert number(value) == ind.float16(int(pattern, 16))
    for family, state, product, total, h, pattern, value in summed:
        x = int(state, 16) * 0x83DCD12D % 2**32
        assert product == f"0x{x:08x}"
        assert int(total) == sum(x.to_bytes(4, "little")) == int(h) - 1024
        assert int(pattern, 16) == ind.exl3_codes(code(family))[int(state, 16)]
        assert number(value) == ind.float16(int(pattern, 16))


# --- all pages -------------------------------------------------------------------------------------


def words_of_64(body: str) -> list[str]:
    return re.findall(r"\b[0-9a-f]{64}\b", body)


def test_every_hash_and_constant_on_the_pages_is_known() -> None:
    """A number of eight or more hex digits on any page is one that was computed here."""
    known = {sha256(b"espalier\n")}
    for name in ind.codebook_names(GRIDS):
        known |= {codebook(name).sha256, f"{codebook(name).multiplier:08x}"}
    known |= {f"{addend:08x}" for _, addend in ind.EXL3.values()} | {"8fff8fff", "3b603b60"}
    # Checked one by one elsewhere: digests, the blob hash, 1/sqrt(32), the wrong constants of the draft.
    elsewhere = {
        "manifest.md": set(re.findall(r"\b[0-9a-f]{40,64}\b", text("manifest.md"))),
        "rotation.md": {row[1][2:] for row in table("rotation.md", "7")},
        "rationale.md": {"05517872", "03d45e64"},
        "exl3.md": set(words_of_64(sections("exl3.md")["6"])),
        "conformance.md": {"7f800000"},
    }
    for page in PAGES:
        lookups = set()
        if page.startswith("codebook-"):
            body = sections(page)["4" if page != "codebook-exl3.md" else "6"]
            lookups = {item.lower() for item in re.findall(r"0x([0-9a-f]{8})\b", body)}
        stated = {
            item.lower() for item in re.findall(r"\b(?:0x)?([0-9A-Fa-f]{8}|[0-9a-f]{40}|[0-9a-f]{64})\b", text(page))
        }
        crcs = {f"{zlib.crc32(codebook(name).bytes):08x}" for name in ind.codebook_names(GRIDS)}
        decimal = {
            item for item in stated if item.isdigit() and len(item) == 8 and f"0x{item}" not in text(page).lower()
        }
        unknown = stated - known - crcs - lookups - elsewhere.get(page, set()) - decimal
        assert not unknown, (page, unknown)
