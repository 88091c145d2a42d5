"""Codebooks: the map from a 16-bit trellis state to a number.

There are two kinds. A *grid* codebook (spec/codebook-int5.md) looks a multiplied state up in a small
table of integers that tensor cores compute with; an *EXL3* codebook (spec/codebook-exl3.md) hashes the
state to a float16. Everything is frozen: a checkpoint that names other constants is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import frexp
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from espalier_format.codec.tile import HALFWORDS
from espalier_format.errors import CodebookError, ShapeError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

STATES: Final = 1 << 16
"""Number of trellis states, and so of entries in every codebook."""

EXL3_MARKERS: Final[Mapping[str, int]] = MappingProxyType({"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D})
"""EXL3 marker tensor (the last part of its name) to the one value it may hold, as an unsigned number."""

_WHOLE_WIDTHS: Final = ("1", "2", "3", "4", "5", "6", "7", "8")
_HALF_WIDTHS: Final = ("1.5", "2.5", "3.5")
# family: (multiplier, addend, SHA-256 of the 65,536 values as little-endian float16, widths)
_EXL3_FAMILIES: Final[Mapping[str, tuple[int, int, str, tuple[str, ...]]]] = {
    "exl3-3inst": (
        0x05517C72,
        0x03D45AA4,
        "ad88de2dcff5bb05fff2faec37cceceb43aa1c2e8203f9d81a6fbd6dd3393eea",
        _WHOLE_WIDTHS,
    ),
    "exl3-mcg": (
        EXL3_MARKERS["mcg"],
        0,
        "95383563929baa9d1ae5de0be22490284382673620bdd85929feea7bdbef04a9",
        _WHOLE_WIDTHS,
    ),
    "exl3-mul1": (
        EXL3_MARKERS["mul1"],
        0,
        "bc48d02cb1c14939dc47b90f870dd689d63e3b1ab69a157e65538db68677a6c8",
        tuple(sorted(_WHOLE_WIDTHS + _HALF_WIDTHS)),
    ),
}


@dataclass(frozen=True, slots=True)
class Codebook:
    """One codebook of the format: a family (the numbers) at one width (bits per weight).

    ``value = codes[state] * value_scale``. Instances are those of `CODEBOOKS`; they are compared by
    value and may be used as keys.
    """

    name: str
    """``<family>@<width>``, as in a checkpoint's config: "e2m1@1.5", "exl3-mul1@2.5"."""
    family: str
    """"e2m1", "int5", "int6", "int8", "exl3-3inst", "exl3-mcg" or "exl3-mul1"."""
    width: str
    """Bits per weight as spelled in the name: "1", "1.5", "2", never "1.0"."""
    half_steps: int
    """Twice the bits per weight: an exact integer."""
    multiplier: int
    """What a state is multiplied with, modulo 2^32."""
    addend: int
    """What is added to the product, modulo 2^32; 0 except for exl3-3inst."""
    index_bits: int
    """Grids: how many high bits of the product index the table. EXL3 codebooks: 0."""
    value_scale: float
    """What a code is multiplied with to give the value: 0.5 for e2m1, which stores doubled codes, else 1."""
    sha256: str
    """Grids: SHA-256 of the table, one int8 an entry. EXL3: of the 65,536 values as little-endian float16."""

    @property
    def bits(self) -> float:
        """Bits per weight (exact: a multiple of one half)."""
        return self.half_steps / 2

    @property
    def halfwords_per_tile(self) -> int:
        """16-bit words that one 16x16 tile takes: the last dimension of the trellis tensor."""
        return 8 * self.half_steps

    @property
    def scale_exponent(self) -> int:
        """The exponent e of ``value_scale`` = 2^e, which decoders rely on.

        Raises CodebookError for a scale that is no power of two; `CODEBOOKS` has none.
        """
        mantissa, exponent = frexp(self.value_scale)
        if mantissa != 0.5:
            raise CodebookError(f"the value scale {self.value_scale} of {self.name} is no power of two")
        return exponent - 1

    @property
    def is_grid(self) -> bool:
        """Whether the values are integers on a hardware number grid."""
        return not self.family.startswith("exl3-")

    @property
    def code_dtype(self) -> np.dtype[Any]:
        """Dtype of `codes`: int8 for a grid, float16 for an EXL3 codebook."""
        import numpy as np  # noqa: PLC0415 - configs are read without decoding

        return np.dtype(np.int8 if self.is_grid else np.float16)

    @property
    def codes(self) -> NDArray[Any]:
        """All 65,536 codes, indexed by state: shape (65536,), dtype `code_dtype`, read-only.

        Built at the first use and shared by all codebooks with the same numbers; safe to call from
        several threads.
        """
        if self.is_grid:
            return _grid_codes(self.family, self.multiplier, self.index_bits)
        return _exl3_codes(self.family)

    @property
    def multiplier_hex(self) -> str:
        """The multiplier as a config spells it: "0x" and eight upper-case digits."""
        return f"0x{self.multiplier:08X}"


def get_codebook(name: Codebook | str) -> Codebook:
    """Return the codebook of that name; one of `CODEBOOKS` that is given as such is returned as it is.

    Raises CodebookError for everything that is not in `CODEBOOKS`.

    >>> codebook = get_codebook("e2m1@1.5")
    >>> codebook.family, codebook.bits, codebook.halfwords_per_tile, codebook.multiplier_hex
    ('e2m1', 1.5, 24, '0x467B7AF9')
    """
    wanted = name.name if isinstance(name, Codebook) else name
    try:
        codebook = CODEBOOKS.get(wanted)
    except TypeError:  # something that has no hash
        codebook = None
    if codebook is not None and codebook is not name and isinstance(name, Codebook) and codebook != name:
        raise CodebookError(f"this codebook differs from the {codebook.name} of this format version")
    if codebook is None:
        raise CodebookError(f"unknown codebook {name!r}; this format version knows {len(CODEBOOKS)}, e.g. 'e2m1@2'")
    return codebook


def exl3_codebook(marker: str | None, halfwords: int) -> Codebook:
    """Return the codebook of an EXL3 tensor from its marker and the last dimension of its trellis.

    ``marker`` is None (3INST), "mcg" or "mul1". Raises ShapeError when no rate of EXL3 has that many
    halfwords, and CodebookError for an unknown marker or a half-integer rate without "mul1".
    """
    if halfwords not in HALFWORDS:
        raise ShapeError("no EXL3 rate has this many halfwords a tile", expected=list(HALFWORDS), got=halfwords)
    if marker is not None and marker not in EXL3_MARKERS:
        raise CodebookError(f"unknown EXL3 codebook marker {marker!r}")
    half_steps = halfwords // 8
    if half_steps % 2 and marker != "mul1":
        raise CodebookError(f"{half_steps / 2} bits per weight need the mul1 codebook", got=marker or "no marker")
    return get_codebook(f"exl3-{marker or '3inst'}@{spell_width(half_steps)}")


def spell_width(half_steps: int) -> str:
    """Return the spelling of a width in names and configs: "2" for 4 half steps, "2.5" for 5."""
    return f"{half_steps // 2}.5" if half_steps % 2 else str(half_steps // 2)


def _half_steps(width: str) -> int:
    return int(2 * float(width))


@cache
def _grids() -> dict[str, dict[str, Any]]:
    text = (resources.files("espalier_format.spec") / "grids.json").read_text(encoding="utf-8")
    grids: dict[str, dict[str, Any]] = json.loads(text)
    return grids


@cache
def _grid_codes(family: str, multiplier: int, index_bits: int) -> NDArray[np.int8]:
    import numpy as np  # noqa: PLC0415 - as above

    table = np.array(_grids()[family]["table"], dtype=np.int8)
    states = np.arange(STATES, dtype=np.uint32)
    codes: NDArray[np.int8] = table[(states * np.uint32(multiplier)) >> np.uint32(32 - index_bits)]
    codes.flags.writeable = False
    return codes


@cache
def _exl3_codes(family: str) -> NDArray[np.float16]:
    import numpy as np  # noqa: PLC0415 - as above

    multiplier, addend, _, _ = _EXL3_FAMILIES[family]
    codes: NDArray[np.float16]
    hashed = np.arange(STATES, dtype=np.uint32) * np.uint32(multiplier) + np.uint32(addend)
    if family == "exl3-mul1":
        # The fused multiply-add of the specification: the float64 product and sum are exact (an 11-bit
        # integer times an 11-bit significand), so the cast is the one rounding.
        byte_sums = sum((hashed >> np.uint32(shift)) & np.uint32(0xFF) for shift in (0, 8, 16, 24))
        slope, offset = np.array([0x1EEE, 0xC931], dtype=np.uint16).view(np.float16).astype(np.float64)
        codes = ((1024.0 + byte_sums) * slope + offset).astype(np.float16)
    else:
        masked = (hashed & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)
        low = (masked & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16)
        high = (masked >> np.uint32(16)).astype(np.uint16).view(np.float16)
        # Both lie in [0.125, 2) in magnitude, so the float32 sum is exact and the cast rounds once.
        codes = (low.astype(np.float32) + high.astype(np.float32)).astype(np.float16)
    codes.flags.writeable = False
    return codes


def _all_codebooks() -> Mapping[str, Codebook]:
    found: dict[str, Codebook] = {}
    for family, grid in _grids().items():
        for width, constants in grid["widths"].items():
            found[f"{family}@{width}"] = Codebook(
                name=f"{family}@{width}",
                family=family,
                width=width,
                half_steps=_half_steps(width),
                multiplier=int(constants["multiplier"], 16),
                addend=0,
                index_bits=grid["index_bits"],
                value_scale=float(grid["value_scale"]),
                sha256=grid["table_sha256"],
            )
    for family, (multiplier, addend, sha256, widths) in _EXL3_FAMILIES.items():
        for width in widths:
            found[f"{family}@{width}"] = Codebook(
                name=f"{family}@{width}",
                family=family,
                width=width,
                half_steps=_half_steps(width),
                multiplier=multiplier,
                addend=addend,
                index_bits=0,
                value_scale=1.0,
                sha256=sha256,
            )
    return MappingProxyType(found)


CODEBOOKS: Final[Mapping[str, Codebook]] = _all_codebooks()
"""Every codebook of format version 1 by name: the grids by family and width, then EXL3's."""
