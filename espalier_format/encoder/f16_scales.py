"""Scales as F16: where to put the common factor of suh and svh, and what does not fit."""

from __future__ import annotations

from math import floor, log2
from typing import Final

import numpy as np
from numpy.typing import NDArray

from espalier_format.errors import ScaleOverflowError

_LARGEST: Final = 15
"""Scales are placed below 2^(this + 1) = 65536, less a margin of half a binary digit for the refit."""
_LEAST_NORMAL: Final = -14
_LEAST_USEFUL: Final = -20
"""Below 2^this a scale has less than 4 significant bits."""
_NEGLIGIBLE: Final = 2.0**-24
"""A channel this much smaller than the largest of its side is beyond what F32 weights resolve beside it."""


def place_exponent(inputs: NDArray[np.float64], outputs: NDArray[np.float64], *, name: str) -> int:
    """Return e such that ``inputs * 2^-e`` and ``outputs * 2^e`` suit F16 best.

    Outputs are placed near 1 (a runtime multiplies activations by suh first, in F16, so the small factor belongs
    there), unless that makes a scale of either side overflow or subnormal; then as far from that as needed. Where
    subnormal scales cannot be avoided, the two sides share the loss.

    Channels of less than 2^-24 of the largest of their side do not count. Raises ScaleOverflowError, naming the
    module, when others would overflow, or keep less than 4 significant bits, at every e.
    """
    # The exponent e is taken from the logarithms of inputs and added to those of outputs.
    high_in, high_out = _largest(inputs), _largest(outputs)
    low_in, low_out = _smallest(inputs), _smallest(outputs)
    wanted = _clamp(-(high_out + low_out) / 2, _LEAST_NORMAL - low_out, low_in - _LEAST_NORMAL)
    at_least, at_most = high_in - (_LARGEST + 0.5), (_LARGEST + 0.5) - high_out
    exponent = floor(_clamp(wanted, at_least, at_most) + 0.5)
    if at_least > at_most:
        raise ScaleOverflowError(
            "the weight is too large for scales in F16",
            tensor=name,
            expected="products of scales below 2^31",
            got=f"2^{high_in + high_out:.1f}",
        )
    if min(low_in - exponent, low_out + exponent) < _LEAST_USEFUL:
        raise ScaleOverflowError(
            "the weight is too small, or its channels are too unlike, for scales in F16",
            tensor=name,
            got=f"2^{low_in:.0f} to 2^{high_in:.0f} times 2^{low_out:.0f} to 2^{high_out:.0f}",
        )
    return exponent


def to_f16(scales: NDArray[np.float64], exponent: int, *, name: str) -> NDArray[np.float16]:
    """Return ``scales * 2^exponent`` in F16, rounded once; zero is +0.

    Raises ScaleOverflowError, naming the module, when one overflows. One that is too small becomes +0: see `flushed`.
    """
    with np.errstate(over="ignore", under="ignore"):
        rounded = np.ldexp(scales, exponent).astype(np.float16)
    if not np.isfinite(rounded).all():
        raise ScaleOverflowError("a scale is too large for F16", tensor=name)
    return rounded + np.float16(0)


def flushed(scales: NDArray[np.float64], rounded: NDArray[np.float16]) -> int:
    """Return how many scales are not zero but became zero."""
    return int(np.count_nonzero((scales != 0) & (rounded == 0)))


def _largest(scales: NDArray[np.float64]) -> float:
    return log2(float(np.abs(scales).max()))


def _smallest(scales: NDArray[np.float64]) -> float:
    """Return the logarithm of the smallest scale that counts."""
    sizes = np.abs(scales)
    return log2(float(sizes[sizes >= sizes.max() * _NEGLIGIBLE].min()))


def _clamp(value: float, low: float, high: float) -> float:
    """Return the number nearest to ``value`` in [low, high]; the middle if there is none."""
    return min(max(value, low), high) if low <= high else (low + high) / 2
