"""Every number on a page of spec/ is read from the page and compared with an independent computation.

The codebook pages and rationale.md have files of their own. Not checked: prose, that is whether a
sentence follows from another.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from fractions import Fraction
from typing import Any

import independent as ind
import pytest
from make_vectors import GRIDS, codebook, hex4, noise, tile_halfwords
from pages import (
    MINUS,
    SPEC,
    code,
    flat,
    indented,
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


# --- packing.md ------------------------------------------------------------------------------------


def test_widths() -> None:
    rows = [
        [width, *map(str, (h, 8 * h, ind.step_bits(0, h), ind.step_bits(1, h), 128 * h))]
        for width, h in ind.WIDTHS.items()
    ]
    assert table("packing.md", "2") == rows


def test_closed_form_of_the_ends_of_windows() -> None:
    whole, half = table("packing.md", "4")
    assert whole == ["K", "(i + 1)·K"]
    assert half == ["K + ½", "(i div 2)·(2K + 1) + K, and K + 1 more if i is odd"]
    for h in ind.WIDTHS.values():
        k, end = h // 2, 0
        for i in range(256):
            end += ind.step_bits(i, h)
            assert end == ((i // 2) * (2 * k + 1) + k + (k + 1) * (i % 2) if h % 2 else (i + 1) * k)


def test_permutation() -> None:
    rows = table("packing.md", "5")
    assert [int(row[0]) for row in rows] == list(range(0, 256, 16))
    entries = [entry for row in rows for entry in integers(row[1])]
    assert entries == [16 * row + column for row, column in map(ind.tile_position, range(256))]
    assert sorted(entries) == list(range(256))


@pytest.mark.parametrize(("section", "half_steps"), [("7.1", 2), ("7.2", 3)])
def test_worked_example_of_packing(section: str, half_steps: int) -> None:
    body = sections("packing.md")[section]
    stored, *rest = [words(run) for run in indented(body)]
    assert stored == tile_halfwords(half_steps)
    stream = [stored[m ^ 1] for m in range(len(stored))]
    assert rest in ([], [stream])
    states = ind.unpack(stored, half_steps)
    heading = re.search(r"^\| i \|(.*)\|$", body, re.MULTILINE)
    assert heading is not None
    positions = [int(cell) for cell in heading[1].split("|")]
    assert tables(body)[0] == [["state(i)", *(f"{states[i]:04x}" for i in positions)]]
    if section == "7.1":
        last, first = f"0x{stream[-1]:04x}", f"0x{stream[0]:04x}"
        assert f"halfword is {last} and the first is {first}, whose top bit is {stream[0] >> 15}." in flat(body)
        assert f"(({last} << 1) OR {stream[0] >> 15}) AND 0xFFFF = 0x{states[0]:04x}" in flat(body)
        assert "W = 16, R = 256" in body
    else:
        assert f"is h[22] = 0x{stream[-1]:04x}, the first is h[1] = 0x{stream[0]:04x} = {stream[0]:016b} in" in flat(
            body
        )
        assert f"bits of the stream and then {stream[0] >> 15}." in flat(body)
        assert f"brings two bits, {stream[0] >> 13 & 3:02b}:" in flat(body)
        assert f"(({states[0]:04x} << 2) OR {stream[0] >> 13 & 3}) AND 0xFFFF = {states[1]:04x}" in flat(body)
        assert f"brings one bit again, {stream[0] >> 12 & 1}." in flat(body)
        assert "W = 24, R = 384, and d = 1, 2, 1, 2" in body


def test_formula_of_the_packing_vectors() -> None:
    formula = re.search(r"h\[j\] = \((\d+)·j \+ (\d+)\) mod (\d+)", flat(text("packing.md")))
    assert formula is not None
    factor, addend, modulus = map(int, formula.groups())
    assert [(factor * j + addend) % modulus for j in range(128)] == tile_halfwords(16)


# --- rotation.md -----------------------------------------------------------------------------------


def test_padded_sizes() -> None:
    units, examples = tables(sections("rotation.md")["2"])
    assert units == [["0", "16"], ["32, 64, 128, 256", "the block size"]]
    assert len(examples) >= 6
    for size, block, padded in examples:
        assert int(padded) == ind.padded(int(size), int(block))


def test_formats() -> None:
    for name, bits, precision, least, largest in table("rotation.md", "5"):
        assert (int(precision), int(number(least)), int(bits)) == ind.FORMATS[name]
        top = -int(number(least)) + 1
        value = (2 - Fraction(1, 2 ** (int(precision) - 1))) * 2**top
        if name == "float16":
            assert int(largest) == value
        else:
            assert largest == f"(2 − 2^−{int(precision) - 1}) · 2^{top}"
    assert "first magnitude that overflows float16 is 65520" in flat(text("rotation.md"))
    assert ind.round_fraction(Fraction(65520), "float16") == 0x7C00
    assert ind.round_fraction(Fraction(65520) - Fraction(1, 10**9), "float16") == 0x7BFF


def test_worked_column() -> None:
    for name, pattern in table("rotation.md", "7"):
        digits = ind.FORMATS[name][2] // 4
        assert pattern == f"0x{ind.round_root(False, Fraction(1, 32), name):0{digits}x}"
    column = ind.hadamard_product([int(i == 3) for i in range(32)], 32)
    signs = " ".join("+" if value > 0 else MINUS for value in column[:8])
    assert f"The first eight signs are {signs}." in flat(sections("rotation.md")["7"])


def test_worked_ties() -> None:
    body = flat(sections("rotation.md")["7"])
    cases = (
        (
            0x3C01,
            12,
            "suh[k] = 1.0009765625 (0x3C01), svh[n] = 1, V = 12. The exact weight is 12.01171875.",
            "nearer: {}.",
        ),
        (0x3C02, 16, "suh[k] = 1.001953125 (0x3C02) and V = 16 the exact weight is 16.03125;", "16 and 16.125: {}."),
        (
            0x3C04,
            1,
            "suh[k] = 1.00390625 (0x3C04) and V = 1 the exact weight 1.00390625 is halfway",
            "so it becomes {}.",
        ),
    )
    for scale, value, sentence, result in cases:
        exact = ind.float16(scale) * value
        stated = [number(item) for item in re.findall(r"\d+\.\d+", sentence)]
        assert stated[0] == ind.float16(scale)
        assert stated[-1] == exact
        assert sentence in body
        assert result.format(f"0x{ind.round_fraction(exact, 'bfloat16'):04x}") in body
    # The neighbours that the text names: one step of bfloat16 up from 12, 16 and 1.
    for low, high in ((12, "12.0625"), (16, "16.125"), (1, "1.0078125")):
        up = ind.round_fraction(Fraction(low), "bfloat16") + 1
        assert ind.round_fraction(Fraction(high), "bfloat16") == up
        assert high in body
    assert Fraction("1.0078125") + 1 == 2 * Fraction("1.00390625")


def test_largest_unscaled_sum() -> None:
    largest = max(abs(value) for entry in GRIDS.values() for value in entry["table"])
    body = flat(sections("rotation.md")["8"])
    assert f"256·256·{largest} = {256 * 256 * largest:,}, below 2^24" in body
    assert 256 * 256 * largest < 2**24


def test_largest_values() -> None:
    stated, _ = tables(sections("rotation.md")["6"])
    for family, largest in stated:
        name = next(name for name in ind.codebook_names(GRIDS) if name.startswith(f"{code(family)}@"))
        book = codebook(name)
        assert number(largest) == max(abs(book.value(c)) for c in book.codes)
    assert [code(row[0]) for row in stated] == GRID_NAMES + EXL3_NAMES


# --- config.md -------------------------------------------------------------------------------------


def json_examples() -> list[dict[str, Any]]:
    return [json.loads(block) for block in re.findall(r"```json\n(.*?)```", text("config.md"), re.DOTALL)]


def test_codebook_table() -> None:
    rows = table("config.md", "3", 1)
    assert [code(row[0]) for row in rows] == ind.codebook_names(GRIDS)
    for name, halfwords, multiplier, addend, sha in rows:
        book = codebook(code(name))
        assert int(halfwords) == 8 * book.half_steps
        assert multiplier == f"0x{book.multiplier:08X}"
        assert addend == (f"0x{ind.EXL3['exl3-3inst'][1]:08X}" if "3inst" in name else "–")
        assert code(sha) == book.sha256


def size(sizes: dict[str, Any], name: str) -> tuple[int, int, int]:
    rotation = sizes["rotation"]
    stored = ind.padded(sizes["in_features"], rotation["in"]) * ind.padded(sizes["out_features"], rotation["out"])
    return ind.WIDTHS[name.split("@")[1]], stored, sizes["in_features"] * sizes["out_features"]


def test_averages_of_the_examples() -> None:
    dense, experts, _ = json_examples()
    for block in (dense, experts):
        head = [size(m, m["codebook"]) for name, m in block["modules"].items() if name == "lm_head"]
        rest = [size(m, m["codebook"]) for name, m in block["modules"].items() if name != "lm_head"]
        for bank in block["expert_banks"].values():
            for projection in bank["projections"].values():
                assert len(projection["assignment"]) == bank["num_experts"]
                rest += [
                    size(projection, projection["codebooks"][int(character, 36)])
                    for character in projection["assignment"]
                    if character != "-"
                ]
        assert block["bits"] == float(round(ind.average_bits(rest), 6))
        assert block["head_bits"] == (float(round(ind.average_bits(head), 6)) if head else None)
    assert f"`bits` is {dense['bits']}: k_proj is padded from 100 to 112 outputs" in flat(sections("config.md")["10"])
    assert dense["modules"]["model.layers.0.self_attn.k_proj"]["out_features"] == 100
    assert ind.padded(100, 0) == 112
    gate = experts["expert_banks"]["model.layers.0.mlp.experts"]["projections"]["gate_proj"]
    assert gate["assignment"].index("-") == 5
    assert "In `gate_proj`, expert 5 is plain." in flat(text("config.md"))


# --- manifest.md, conformance.md, exl3.md ------------------------------------------------------------


def test_hashes_of_the_small_file() -> None:
    content = b"espalier\n"
    rows = {code(row[0]): code(row[1]) for row in table("manifest.md", "3", 1)}
    blob = b"blob %d\0%b" % (len(content), content)
    assert rows == {
        "size": str(len(content)),
        "sha256": sha256(content),
        "git_blob_sha1": hashlib.sha1(blob, usedforsecurity=False).hexdigest(),
    }
    assert "the nine bytes `espalier` and a line feed" in flat(text("manifest.md"))


def test_worked_digest() -> None:
    body = sections("manifest.md")["5"]
    name = re.search(r"codebook `(.*?)`", flat(body))
    assert name is not None
    book = codebook(name[1])
    stored, digest = indented(body)
    rows = ind.decode_tiles([[words(stored)]], book)
    data = b"".join(struct.pack("<h", value) for row in rows for value in row)
    assert len(data) == 512
    assert digest == sha256(data)
    assert f"has the codes {' '.join(map(str, rows[0]))}, so" in flat(body)
    assert f"`{data[:8].hex(' ')}`" in flat(body)


def test_noise() -> None:
    assert f"So noise(`abc`) begins {hex4(noise('abc', 8))}." in flat(text("conformance.md"))


def test_vector_files_are_listed() -> None:
    listed = {code(row[0]) for row in table("conformance.md", "2")}
    assert listed == {path.name for path in (SPEC / "vectors").iterdir()}


def test_keys_of_grids_and_codebooks_are_listed() -> None:
    _, grids, books = tables(sections("conformance.md")["2"])
    entry = GRIDS["int5"]
    in_grids = {*entry, *entry["widths"]["3"]}
    assert set(re.findall(r"`(\w+)`", " ".join(" ".join(row) for row in grids))) == in_grids
    codebooks = json.loads((SPEC / "vectors/codebooks.json").read_text("ascii"))["codebooks"]
    in_books = {key for entry in codebooks.values() for key in entry}
    assert set(re.findall(r"`(\w+)`", " ".join(row[0] for row in books))) == in_books
    assert "the states 0 … 15 and 65520 … 65535" in flat(text("conformance.md"))
    assert 65536 - 16 == 65520


def test_keys_of_module_vectors_are_listed() -> None:
    listed = set(re.findall(r"`([a-z0-9_]+)`", " ".join(row[0] for row in table("conformance.md", "4"))))
    modules = json.loads((SPEC / "vectors/rotation.json").read_text("ascii"))["modules"]
    assert {key for module in modules for key in module} == listed
    assert f"whole modules for {'twelve' if len(modules) == 12 else len(modules)} pairs" in flat(text("rotation.md"))


def test_patterns_of_overflow() -> None:
    body = flat(sections("conformance.md")["5"])
    for name in ("float16", "bfloat16", "float32"):
        digits = ind.FORMATS[name][2] // 4
        assert f"{name} `{ind.round_fraction(Fraction(2**200), name):0{digits}x}`" in body


def test_range_of_weights() -> None:
    """The bounds of conformance.md §5 hold for every codebook and all blocks."""
    stated = re.search(r"between 2\^−(\d+) and 2\^(\d+) in", flat(sections("conformance.md")["5"]))
    assert stated is not None
    low, high = Fraction(1, 2 ** int(stated[1])), Fraction(2 ** int(stated[2]))
    unit = min(codebook(name).unit for name in ind.codebook_names(GRIDS))
    largest = max(abs(codebook(name).value(c)) for name in ind.codebook_names(GRIDS) for c in codebook(name).codes)
    # Sums of signed units, divided by the root of 256·256; each scale at least 2^-24 and at most 65504.
    assert low <= unit / 256 / 2**48
    assert high > 256 * largest * 65504**2
    for name in ("float32", "bfloat16"):
        precision, least, _ = ind.FORMATS[name]
        assert low > Fraction(2) ** least
        assert high < 2 ** (1 - least)
        assert precision > 1


def test_fp64_of_the_vectors() -> None:
    precision, least, _ = ind.FORMATS["float64"]
    stated = f"fp64 ({precision} significand bits, least normal exponent {MINUS}{-least})"
    assert stated in flat(sections("conformance.md")["4"])


def test_example_of_packed_signs() -> None:
    body = sections("exl3.md")["3"]
    word = re.search(r"the word 0x([0-9A-F]{4}) expands to", flat(body))
    assert word is not None
    assert [words(run) for run in indented(body)] == [ind.expand_signs([int(word[1], 16)])]


def test_markers_as_signed_numbers() -> None:
    found = re.findall(r"`(mcg|mul1)` = (0x[0-9A-F]{8}), as a signed number −(\d+)", flat(text("exl3.md")))
    assert [name for name, _, _ in found] == ["mcg", "mul1"]
    for name, unsigned, magnitude in found:
        assert int(unsigned, 16) == ind.EXL3[f"exl3-{name}"][0] == 2**32 - int(magnitude)


def test_keys_of_all_vectors_are_listed() -> None:
    rows = {code(row[0]): row[2] for row in table("conformance.md", "2")}
    for name, row in rows.items():
        document = json.loads((SPEC / "vectors" / name).read_text("ascii"))
        for key in document.keys() - {"about"}:
            assert f"`{key}`" in row, (name, key)
    for name, key in (("packing.json", "widths"), ("tiles.json", "tiles"), ("bits.json", "configs")):
        content = json.loads((SPEC / "vectors" / name).read_text("ascii"))[key]
        entries = content.values() if isinstance(content, dict) else content
        assert all(f"`{inner}`" in rows[name] for entry in entries for inner in entry), name


def test_halfwords_of_small_modules() -> None:
    assert "only where they are at most 512" in flat(text("conformance.md"))
    for module in json.loads((SPEC / "vectors/rotation.json").read_text("ascii"))["modules"]:
        stored = module["trellis_shape"][0] * module["trellis_shape"][1] * module["trellis_shape"][2]
        assert ("trellis" in module) == (stored <= 512)
        assert hex4(noise(module["trellis_label"], stored)) == module.get(
            "trellis", hex4(noise(module["trellis_label"], stored))
        )
