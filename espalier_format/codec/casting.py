"""Casts between the floating dtypes of checkpoints: one rounding, to nearest even, from the exact value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from espalier_format.errors import ScaleOverflowError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

FLOAT_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
"""Floating dtypes as safetensors spells them, and how numpy holds them: BF16 as its bit patterns."""


def cast_floats(values: NDArray[Any], source: str, target: str, *, name: str) -> NDArray[Any]:
    """Return ``values`` of dtype ``source`` as ``target``, both names of ``FLOAT_DTYPES``.

    Widening is exact; narrowing rounds once, subnormals included. Infinities stay infinities, NaN stays
    NaN, zeros keep their sign. ``name`` is the tensor, for messages.

    Raises:
        ScaleOverflowError: a finite value is too large for ``target``.
        UsageError: a dtype is not one of ``FLOAT_DTYPES``.
    """
    for dtype in (source, target):
        if dtype not in FLOAT_DTYPES:
            raise UsageError("not a floating dtype that can be cast", tensor=name, got=dtype)
    if source == target:
        return values
    wide = (values.astype("<u4") << np.uint32(16)).view("<f4") if source == "BF16" else values
    with np.errstate(over="ignore", invalid="ignore"):
        cast = _to_bfloat16(wide) if target == "BF16" else wide.astype(FLOAT_DTYPES[target])
    infinite = (cast & 0x7FFF) == 0x7F80 if target == "BF16" else np.isinf(cast)
    overflowed = infinite & np.isfinite(wide)
    if overflowed.any():
        raise ScaleOverflowError(f"a value is too large for {target}", tensor=name, got=float(wide[overflowed].flat[0]))
    return cast


def _to_bfloat16(values: NDArray[Any]) -> NDArray[np.uint16]:
    single = _to_float32_odd(values) if values.dtype == np.float64 else values.astype("<f4")
    bits = np.ascontiguousarray(single).view("<u4").reshape(single.shape)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet_nan, rounded).astype("<u2")


def _to_float32_odd(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Round to float32 toward zero, and set the last bit where that was inexact.

    Rounding that again, to at most 22 bits, gives what rounding the float64 directly would: an inexact
    value cannot fall on a midpoint.
    """
    nearest = values.astype("<f4")
    bits = np.ascontiguousarray(nearest).view("<u4").reshape(nearest.shape)
    magnitude, exact = np.abs(nearest.astype("<f8")), np.abs(values)
    finite = np.isfinite(values)
    bits = bits - (finite & (magnitude > exact)).astype("<u4")
    bits |= (finite & (magnitude != exact)).astype("<u4")
    result: NDArray[np.float32] = bits.view(np.float32)
    return result
