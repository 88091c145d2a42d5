"""A quantized module of the kit: its description, its tensors and what they decode to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.codebook import Codebook, get_codebook
from espalier_format.codec.magnitude import FLOAT16_OVERFLOW
from espalier_format.codec.rotation import padded
from espalier_format.codec.rounding import OutputDtype
from espalier_format.codec.tile import TILE
from espalier_format.conformance import noise
from espalier_format.kernels import numpy_decoder, reference

Scales = Literal["usual", "small", "zero", "padding", "ties", "subnormal", "steep", "overflow", "nan", "infinite"]
"""What the scales of a module are like; `ModuleCase.scales` says it of each."""

DTYPES: Final[tuple[OutputDtype, ...]] = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class ModuleCase:
    """One quantized module: everything follows from these fields. ``label`` names its noise."""

    label: str
    codebook: str
    rotation_in: int
    rotation_out: int
    in_features: int
    out_features: int
    scales: Scales = "usual"
    """"usual" and "small": `noise.scales` with and without a large one in suh. "zero": svh is zero. "padding": usual,
    with numbers in the padding. "ties": 1 + k/1024 in suh, 1 in svh. "subnormal": so small that float16 weights are
    subnormal. "steep": at least 2^15 in suh and tiny in svh, so that inputs times suh overflow float16 and weights and
    outputs do not. "overflow": so large that float16 weights overflow. "nan": one in suh. "infinite": one in the
    padding of svh."""

    @property
    def book(self) -> Codebook:
        """The codebook."""
        return get_codebook(self.codebook)

    @property
    def padded_in(self) -> int:
        """Stored input size."""
        return padded(self.in_features, self.rotation_in)

    @property
    def padded_out(self) -> int:
        """Stored output size."""
        return padded(self.out_features, self.rotation_out)

    @property
    def refused(self) -> dict[str, str]:
        """Output dtype to the error code, for the dtypes in which the weight must be refused."""
        if self.scales == "overflow":
            return {"float16": "scale-overflow"}
        return dict.fromkeys(DTYPES, "non-finite-scale") if self.scales in ("nan", "infinite") else {}

    def tensors(self) -> ModuleTensors:
        """Return the stored tensors; those of the last few modules are remembered."""
        return _tensors(self)

    def codes(self) -> NDArray[Any]:
        """Return the codes by the reference: (in_p, out_p), the codebook's ``code_dtype``."""
        return reference.decode_codes(self.tensors().trellis, self.book)

    def weight(self) -> NDArray[np.float64]:
        """Return the exact weight by the reference, relative error below 2^-50: float64 (out_features, in_features).

        A weight whose scale is an infinity or a NaN is a NaN.
        """
        return _weight(self)

    def lost(self, dtype: OutputDtype) -> NDArray[np.bool_]:
        """Tell which weights are no numbers in a dtype: their scale is not finite, or they overflow."""
        weight = self.weight()
        return np.isnan(weight) | (np.abs(weight) >= FLOAT16_OVERFLOW) if dtype == "float16" else np.isnan(weight)

    def rounded(self, dtype: OutputDtype) -> NDArray[Any]:
        """Return the correctly rounded weight, (out_features, in_features); bfloat16 as uint16 patterns."""
        tensors = self.tensors()
        return numpy_decoder.decode_weight(
            tensors.trellis,
            tensors.suh,
            tensors.svh,
            self.book,
            self.rotation_in,
            self.rotation_out,
            self.in_features,
            self.out_features,
            dtype,
        )


@dataclass(frozen=True, slots=True, eq=False)
class ModuleTensors:
    """int16 (in_p/16, out_p/16, W), float16 (in_p,), float16 (out_p,); all read-only."""

    trellis: NDArray[np.int16]
    suh: NDArray[np.float16]
    svh: NDArray[np.float16]


@lru_cache(maxsize=8)
def _tensors(case: ModuleCase) -> ModuleTensors:
    rows, columns = case.padded_in, case.padded_out
    shape = (rows // TILE, columns // TILE, case.book.halfwords_per_tile)
    trellis = noise.trellis(f"{case.label}/trellis", shape)
    suh = noise.scales(f"{case.label}/suh", rows, case.in_features, large=case.scales != "small")
    svh = noise.scales(f"{case.label}/svh", columns, case.out_features, large=False)
    match case.scales:
        case "zero":
            svh[:] = 0
        case "padding":
            for side, true in ((suh, case.in_features), (svh, case.out_features)):
                side[true:] = noise.scales(f"{case.label}/padding", side.size, side.size, large=True)[true:]
        case "ties":
            suh[: case.in_features] = (1 + np.arange(case.in_features) / 1024).astype(np.float16)
            svh[: case.out_features] = 1
        case "subnormal":
            suh *= np.float16(2**-4)
            svh *= np.float16(2**-6)
        case "steep":
            patterns = noise.halfwords(f"{case.label}/suh", case.in_features)
            suh[: case.in_features] = (patterns & 0x83FF | 0x7800).view(np.float16)
            svh *= np.float16(2**-13)
        case "overflow":
            suh[: case.in_features] = svh[: case.out_features] = 300
        case "nan":
            suh[1] = np.nan
        case "infinite":
            svh[-1] = -np.inf
        case _:
            pass
    for array in (trellis, suh, svh):
        array.flags.writeable = False
    return ModuleTensors(trellis, suh, svh)


@lru_cache(maxsize=8)
def _weight(case: ModuleCase) -> NDArray[np.float64]:
    tensors = case.tensors()
    suh, svh = (np.where(np.isfinite(side), side, np.float16(0)) for side in (tensors.suh, tensors.svh))
    stored = reference.decode_weight(tensors.trellis, suh, svh, case.book, case.rotation_in, case.rotation_out)
    weight = np.ascontiguousarray(stored[: case.in_features, : case.out_features].T) + 0.0
    weight[:, ~np.isfinite(tensors.suh[: case.in_features])] = np.nan
    weight[~np.isfinite(tensors.svh[: case.out_features])] = np.nan
    weight.flags.writeable = False
    return weight
