"""The figures of spec/rationale.md: they agree with grids.json, and the rules that made the tables make them.

Not checked: the errors of the codebooks themselves, which come from a search that is not repeated here.
"""

from __future__ import annotations

import math
import re
from statistics import NormalDist

import independent as ind
from make_vectors import GRIDS
from pages import flat, sections, table, text


def test_errors_in_the_rationale_are_those_of_grids_json() -> None:
    for bits, exl3, grid, bound in table("rationale.md", "1"):
        value, name = re.fullmatch(r"([0-9.]+) \((\w+)\)", grid).groups()
        assert abs(GRIDS[name]["widths"][bits]["mse"] - float(value)) < 10 ** -len(value.split(".")[1])
        assert float(value) < float(exl3.split()[0])
        assert abs(float(bound) - 4.0 ** -int(bits)) < 1e-6


def test_rule_that_made_the_tables() -> None:
    body = flat(sections("rationale.md")["2"])
    assert "0, ½, 1, 1½, 2, 3, 4, 6 repeated 2, 6, 6, 2, 8, 4, 3 and 1 times" in body
    assert "divided by 3.2/15, 3.2/31 and 3.8/127" in body
    counts = dict(zip((0, 1, 2, 3, 4, 6, 8, 12), (2, 6, 6, 2, 8, 4, 3, 1), strict=True))
    upper = {"e2m1": [code for code, count in counts.items() for _ in range(count)]}
    for grid, step, largest in (("int5", 3.2 / 15, 15), ("int6", 3.2 / 31, 31), ("int8", 3.8 / 127, 127)):
        entries = 2 ** GRIDS[grid]["index_bits"]
        quantiles = (NormalDist().inv_cdf((i + 0.5) / entries) for i in range(entries // 2, entries))
        upper[grid] = [min(largest, math.floor(q / step + 0.5)) for q in quantiles]
    for grid, half in upper.items():
        assert GRIDS[grid]["table"] == [-value for value in reversed(half)] + half


def test_conditions_on_multipliers() -> None:
    for entry in GRIDS.values():
        rms = math.sqrt(sum(v * v for v in entry["table"]) / len(entry["table"])) * entry["value_scale"]
        assert abs(rms - entry["rms"]) < 1e-5
        for width, constants in entry["widths"].items():
            if "." not in width:
                multiplier = int(constants["multiplier"], 16)
                assert multiplier >> 32 - int(width) & 1
                assert multiplier >> 16 & 1


def test_numbers_of_the_3inst_constants() -> None:
    row = next(row for row in table("rationale.md", "9") if "exl3-3inst" in row[0])
    right = re.findall(r"(\d+) = (0x[0-9A-F]{8})", row[1])
    assert [(int(decimal), int(hexadecimal, 16)) for decimal, hexadecimal in right] == [
        (n, n) for n in ind.EXL3["exl3-3inst"]
    ]


def test_count_of_codebooks() -> None:
    assert "version 1 has exactly 36 codebooks" in flat(text("rationale.md"))
    assert len(ind.codebook_names(GRIDS)) == 36
