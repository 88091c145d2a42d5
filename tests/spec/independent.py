"""Decodes the format from the pages of spec/ alone: whole numbers and fractions, no project code.

This is the second opinion that the vectors are made with. It shares nothing with the package: no
numpy, no tables but spec/grids.json. It is slow on purpose and short enough to be checked by eye.
"""

from __future__ import annotations

import hashlib
import re
import struct
from fractions import Fraction
from functools import lru_cache
from math import isqrt
from typing import Any

# --- spec/packing.md -------------------------------------------------------------------------------

WIDTHS = {"1": 2, "1.5": 3, "2": 4, "2.5": 5, "3": 6, "3.5": 7, "4": 8, "5": 10, "6": 12, "7": 14, "8": 16}
"""Width as spelled in a name -> half steps (twice the bits per weight)."""


def halfwords_per_tile(half_steps: int) -> int:
    return 8 * half_steps


def step_bits(position: int, half_steps: int) -> int:
    """How many new bits a ring position brings: the odd positions take the extra bit of a half step."""
    return half_steps // 2 + (half_steps & position & 1)


def unpack(halfwords: list[int], half_steps: int) -> list[int]:
    """The 256 states of one stored tile, in ring order."""
    assert len(halfwords) == halfwords_per_tile(half_steps)
    stream = [halfwords[m ^ 1] >> (15 - b) & 1 for m in range(len(halfwords)) for b in range(16)]
    states, end = [], 0
    for position in range(256):
        end += step_bits(position, half_steps)
        state = 0
        for offset in range(end - 16, end):
            state = state << 1 | stream[offset % len(stream)]
        states.append(state)
    assert end == len(stream)
    return states


def pack(states: list[int], half_steps: int) -> list[int]:
    """The stored halfwords of a tile; the states must be those of a tail-biting ring."""
    stream: list[int] = []
    for position, state in enumerate(states):
        bits = step_bits(position, half_steps)
        stream += [state >> (bits - 1 - b) & 1 for b in range(bits)]
    words = [int("".join(map(str, stream[16 * m : 16 * m + 16])), 2) for m in range(len(stream) // 16)]
    halfwords = [words[m ^ 1] for m in range(len(words))]
    assert unpack(halfwords, half_steps) == states
    return halfwords


def tile_position(position: int) -> tuple[int, int]:
    """Ring position -> (row, column) in the 16x16 tile; rows run along in, columns along out."""
    lane, j = divmod(position, 8)
    return 2 * (lane % 4) + (j & 1) + 8 * (j >> 1 & 1), (lane >> 2) + 8 * (j >> 2 & 1)


# --- number formats --------------------------------------------------------------------------------

FORMATS = {  # name: (precision with the hidden bit, least normal exponent, all bits)
    "float16": (11, -14, 16),
    "bfloat16": (8, -126, 16),
    "float32": (24, -126, 32),
    "float64": (53, -1022, 64),
}


def float16_units(bits: int) -> int:
    """The value of a finite fp16 bit pattern, as a multiple of 2^-24, the least of them."""
    exponent, mantissa = bits >> 10 & 31, bits & 1023
    assert exponent != 31
    units = mantissa if exponent == 0 else mantissa + 1024 << exponent - 1
    return -units if bits >> 15 else units


def float16(bits: int) -> Fraction:
    return Fraction(float16_units(bits), 1 << 24)


def round_root(negative: bool, square: Fraction, name: str) -> int:
    """The bit pattern nearest to +-sqrt(square), ties to even; sqrt is never formed, only compared."""
    precision, least, bits = FORMATS[name]
    numerator, denominator = square.numerator, square.denominator
    if numerator == 0:
        return 0
    exponent = (numerator.bit_length() - denominator.bit_length()) // 2  # 2^exponent <= sqrt, or one too large
    if denominator << max(0, 2 * exponent) > numerator << max(0, -2 * exponent):
        exponent -= 1
    exponent = max(exponent, least)
    shift = 2 * (precision - 1 - exponent)  # in units of the last place the square is numerator / denominator
    numerator, denominator = numerator << max(0, shift), denominator << max(0, -shift)
    n = isqrt(numerator // denominator)
    middle = (2 * n + 1) ** 2 * denominator
    n += 4 * numerator > middle or (4 * numerator == middle and n & 1 == 1)
    pattern = (exponent - least << precision - 1) + n
    infinity = ((1 << bits - precision) - 1) << precision - 1
    return min(pattern, infinity) | negative << bits - 1


def round_fraction(value: Fraction, name: str) -> int:
    return round_root(value < 0, value * value, name)


def round_float16(units: int, below: int = 0) -> int:
    """The fp16 pattern nearest to units * 2^-(24 + below), ties to even; no overflow here."""
    shift = max(below, abs(units).bit_length() - 11)
    n, rest = divmod(abs(units), 1 << shift)
    n += 2 * rest > 1 << shift or (2 * rest == 1 << shift and n & 1 == 1)
    return (shift - below << 10) + n | (units < 0) << 15


# --- spec/codebook-*.md ----------------------------------------------------------------------------

U32 = 0xFFFFFFFF
EXL3 = {"exl3-3inst": (89226354, 64248484), "exl3-mcg": (0xCBAC1FED, 0), "exl3-mul1": (0x83DCD12D, 0)}
HALF_STEP_FAMILY = "exl3-mul1"


def exl3_code(family: str, state: int) -> int:
    """The fp16 bit pattern of a state in one of EXL3's codebooks."""
    multiplier, addend = EXL3[family]
    x = state * multiplier + addend & U32
    if family == "exl3-mul1":
        h = 0x6400 + sum(x.to_bytes(4, "little"))
        return round_float16(float16_units(h) * float16_units(0x1EEE) + (float16_units(0xC931) << 24), below=24)
    x = x & 0x8FFF8FFF ^ 0x3B603B60
    return round_float16(float16_units(x & 0xFFFF) + float16_units(x >> 16))


def codebook_names(grids: dict[str, Any]) -> list[str]:
    names = [f"{grid}@{width}" for grid, entry in grids.items() for width in entry["widths"]]
    for family in EXL3:
        names += [f"{family}@{w}" for w, h in WIDTHS.items() if h % 2 == 0 or (family == HALF_STEP_FAMILY and h < 8)]
    return names


class Codes:
    """The 65,536 codes of one codebook: small integers of a grid, or fp16 bit patterns of EXL3."""

    def __init__(self, name: str, grids: dict[str, Any]) -> None:
        family, width = name.split("@")
        self.name, self.half_steps, self.grid = name, WIDTHS[width], family in grids
        if self.grid:
            entry = grids[family]
            self.multiplier, self.scale = int(entry["widths"][width]["multiplier"], 16), Fraction(entry["value_scale"])
            shift, table = 32 - entry["index_bits"], entry["table"]
            self.codes = [table[(s * self.multiplier & U32) >> shift] for s in range(65536)]
            self.sha256 = hashlib.sha256(struct.pack(f"<{len(table)}b", *table)).hexdigest()
            self.bytes = struct.pack("<65536b", *self.codes)
        else:
            self.multiplier = EXL3[family][0]
            self.codes = exl3_codes(family)
            self.bytes = struct.pack("<65536H", *self.codes)
            self.sha256 = hashlib.sha256(self.bytes).hexdigest()

    @property
    def unit(self) -> Fraction:
        """What every value is a whole multiple of."""
        return self.scale if self.grid else Fraction(1, 1 << 24)

    def units(self, code: int) -> int:
        return code if self.grid else float16_units(code)

    def value(self, code: int) -> Fraction:
        return self.units(code) * self.unit

    def text(self, code: int) -> int | str:
        """A code as the vectors write it."""
        return code if self.grid else f"{code:04x}"


@lru_cache
def exl3_codes(family: str) -> list[int]:
    return [exl3_code(family, s) for s in range(65536)]


def decode_tiles(trellis: list[list[list[int]]], codebook: Codes) -> list[list[int]]:
    """Codes of a module, (in_p, out_p), from its tiles (in_p/16, out_p/16, halfwords)."""
    rows = [[0] * (16 * len(trellis[0])) for _ in range(16 * len(trellis))]
    for kt, line in enumerate(trellis):
        for nt, halfwords in enumerate(line):
            for position, state in enumerate(unpack(halfwords, codebook.half_steps)):
                row, column = tile_position(position)
                rows[16 * kt + row][16 * nt + column] = codebook.codes[state]
    return rows


def decode_digest(codes: list[list[int]], *, grid: bool) -> str:
    """spec/manifest.md: SHA-256 of the codes as 16-bit little-endian, row-major."""
    flat = [code for row in codes for code in row]
    return hashlib.sha256(struct.pack(f"<{len(flat)}{'h' if grid else 'H'}", *flat)).hexdigest()


# --- spec/rotation.md ------------------------------------------------------------------------------


def padded(size: int, block: int) -> int:
    unit = block or 16
    return -(-size // unit) * unit


def hadamard_product(vector: list[int], block: int) -> list[int]:
    """H times the vector, without the factor 1/sqrt(block): entry (i, j) is +1 or -1 by the parity of i & j."""
    out = list(vector)
    step = 1
    while step < block:
        for i in range(len(out)):
            if not i & step:
                out[i], out[i | step] = out[i] + out[i | step], out[i] - out[i | step]
        step *= 2
    return out


def exact_weight(
    codes: list[list[int]],
    codebook: Codes,
    scales: tuple[list[int], list[int]],
    blocks: tuple[int, int],
    true: tuple[int, int],
) -> list[list[tuple[bool, Fraction]]]:
    """The exact weight in Hugging Face orientation (out, in), cropped: each entry as (negative, square).

    ``scales`` are suh and svh as fp16 patterns. The square is rational even where the entry holds a factor
    sqrt(2) (one side with block 32 or 128).
    """
    columns = [hadamard_product([codebook.units(c) for c in column], blocks[0]) for column in zip(*codes, strict=True)]
    rows = [hadamard_product(list(row), blocks[1]) for row in zip(*columns, strict=True)]
    square_unit = (codebook.unit / (1 << 48)) ** 2 / ((blocks[0] or 1) * (blocks[1] or 1))
    suh, svh = ([float16_units(bits) for bits in side] for side in scales)
    result = []
    for n in range(true[1]):
        entries = (rows[k][n] * suh[k] * svh[n] for k in range(true[0]))
        result.append(
            [(units < 0, Fraction(units * units * square_unit.numerator, square_unit.denominator)) for units in entries]
        )
    return result


# --- spec/exl3.md ----------------------------------------------------------------------------------


def expand_signs(words: list[int]) -> list[int]:
    """Packed signs -> fp16 patterns of +1 and -1."""
    return [0xBC00 if word >> bit & 1 else 0x3C00 for word in words for bit in range(16)]


# --- spec/config.md --------------------------------------------------------------------------------


def component(name: str, rules: list[tuple[str, str]]) -> str:
    """The component of a name by the lines of §8, each (component, P): P is compared with runs of whole parts."""
    parts = name.split(".")
    for found, pattern in rules:
        for start in range(len(parts)):
            # "^" stands for the start of the name, so only the first part may be compared with what follows it.
            here = re.sub(r"\^", "", pattern) if start == 0 else re.sub(r"\|\^\w+", "", pattern)
            if any(re.fullmatch(here, ".".join(parts[start:end])) for end in range(start + 1, len(parts) + 1)):
                return found
    raise AssertionError(name)


def averages(
    modules: dict[str, Any], banks: dict[str, Any], rules: list[tuple[str, str]]
) -> tuple[float, float | None]:
    """``bits`` and ``head_bits`` of a config with these modules and banks: every expert counted by itself."""
    sums: dict[str, list[tuple[int, int, int]]] = {"decoder": [], "head": []}

    def count(name: str, codebook: str, entry: dict[str, Any]) -> None:
        part = component(name, rules)
        if part in ("mtp", "vision"):
            return
        sizes, blocks = (entry["in_features"], entry["out_features"]), entry["rotation"]
        stored = padded(sizes[0], blocks["in"]) * padded(sizes[1], blocks["out"])
        half_steps = WIDTHS[codebook.split("@")[1]]
        sums["head" if part == "head" else "decoder"].append((half_steps, stored, sizes[0] * sizes[1]))

    for name, entry in modules.items():
        count(name, entry["codebook"], entry)
    for bank, content in banks.items():
        for projection, entry in content["projections"].items():
            for expert, character in enumerate(entry["assignment"]):
                if character != "-":
                    count(f"{bank}.{expert}.{projection}", entry["codebooks"][int(character, 36)], entry)
    head = float(round(average_bits(sums["head"]), 6)) if sums["head"] else None
    return float(round(average_bits(sums["decoder"]), 6)) if sums["decoder"] else 0.0, head


def average_bits(modules: list[tuple[int, int, int]]) -> Fraction:
    """Trellis bits of (half steps, padded weights, true weights) modules over their true weights."""
    return Fraction(sum(h * p for h, p, _ in modules), 2 * sum(t for _, _, t in modules))
