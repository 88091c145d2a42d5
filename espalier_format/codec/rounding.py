"""Correct rounding: from the exact weight, once, to nearest even (spec/rotation.md §5).

A weight is ``sum * row * column / sqrt(2^k)``: ``sum`` a signed sum of values, ``row`` and ``column``
float16 scales, 2^k the product of the two rotation blocks. Every factor but the root is known exactly, so
what the nearest float32, float16 or bfloat16 is can be decided exactly:

1. Compute the weight in float64, to a relative error below 2^-51, and round that to the output dtype.
2. This can differ from rounding the exact weight only where the float64 lies at, or within its own error
   of, the midpoint of two neighbouring numbers of the output dtype. Find those few elements.
3. Decide each by exact arithmetic: where the root is a power of two, with the rounding error of the last
   product, which a second float64 holds without loss; where it is not, by comparing squares as rationals.

The result never depends on the order of additions, the BLAS library or the number of threads.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from espalier_format.errors import ScaleOverflowError, UsageError

OutputDtype: TypeAlias = Literal["float32", "float16", "bfloat16"]
"""Names of the dtypes that weights are rounded to."""

MAX_SUM_BITS: Final = 42
"""Bits that sums may span, from their common unit to the largest: 42, and 11 of a float16, are the 53 of a float64."""

_CLOSE: Final = 16
"""Distance from a midpoint, in ulps of float64, that counts as within the error of step 1 (which is below 4)."""

_FLOAT16_TINY: Final = np.float32(2.0**-14)  # the smallest normal float16
_FLOAT16_LIMIT: Final = np.float32(65520)  # the midpoint of the largest float16 and what would follow it


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """Return the numpy dtype that holds an output dtype: bfloat16 is held as bit patterns in uint16.

    Raises UsageError for a name that is no `OutputDtype`.
    """
    if dtype not in get_args(OutputDtype):
        raise UsageError("no such output dtype", expected=list(get_args(OutputDtype)), got=dtype)
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def scale_and_round(
    sums: NDArray[np.float64],
    rows: NDArray[np.float16],
    columns: NDArray[np.float16],
    root_exponent: int,
    dtype: OutputDtype,
    out: NDArray[Any] | None = None,
    work: NDArray[np.float64] | None = None,
) -> NDArray[Any]:
    """Round ``sums[r, c] * rows[r] * columns[c] / sqrt(2^root_exponent)`` correctly to a dtype.

    ``sums``, float64 (r, c), is **overwritten**; its elements are multiples of some unit u >= 2^-17, each
    below u * 2^MAX_SUM_BITS. ``rows`` (r,) and ``columns`` (c,) are finite float16. The result has shape
    (r, c) and dtype `storage_dtype`, and is written to ``out`` where given; ``work``, contiguous float64 (r, c), saves
    an allocation. An exact zero gives +0.0; a
    value that underflows to zero keeps its sign. With the sums of this format float32 and bfloat16 can
    neither overflow nor underflow. Raises ScaleOverflowError where float16 overflows.
    """
    result = np.empty(sums.shape, storage_dtype(dtype)) if out is None else out
    sums *= rows.astype(np.float64)[:, None]  # exact, see MAX_SUM_BITS
    factors = columns.astype(np.float64) * _reciprocal_root(root_exponent)
    products = np.empty(sums.shape) if work is None else work
    if dtype == "float32":
        np.multiply(sums, factors, out=products)
        # Plus zero: -0.0 becomes +0.0, everything else stays.
        np.add(products, 0.0, out=result, casting="same_kind")
        near, midpoints, lower = _midpoints_float32(products)
    else:
        # float64, then float32. Rounding is monotonic, so the float32 lies on the same side of a midpoint
        # of the narrow dtype as the exact value does, unless it falls on the midpoint.
        singles, spare = products.reshape(-1).view(np.float32).reshape(2, *sums.shape)
        np.multiply(sums, factors, out=singles, casting="same_kind")
        singles += np.float32(0)
        narrow = _narrow_bfloat16 if dtype == "bfloat16" else _narrow_float16
        near, midpoints, lower = narrow(singles, result, spare)
    if near.size:
        at_row, at_column = np.divmod(near, sums.shape[1])
        exact, factor = sums[at_row, at_column], columns[at_column].astype(np.float64)
        side = _compare(np.abs(exact), np.abs(factor), root_exponent, midpoints)
        up = (side > 0) | ((side == 0) & (lower % 2 == 1))
        patterns = lower + up
        bits = np.dtype(f"u{result.itemsize}")
        sign = (np.signbit(exact) != np.signbit(factor)).astype(bits) << bits.type(8 * result.itemsize - 1)
        result[at_row, at_column] = (patterns.astype(bits) | sign).view(result.dtype)
    if dtype == "float16" and np.any((result.view(np.uint16) & np.uint16(0x7FFF)) == np.uint16(0x7C00)):
        raise ScaleOverflowError("a weight is too large for float16: its scales carry it past 65504")
    return result


def _reciprocal_root(exponent: int) -> float:
    """Return 2^(-exponent / 2) in float64, which is exact where the exponent is even."""
    return math.ldexp(math.sqrt(0.5) if exponent % 2 else 1.0, -(exponent // 2))


# The three functions below round, and return, for the elements at or near a midpoint: their flat indices; the
# midpoints, as float64 magnitudes; and the bit patterns (without sign) of the lower neighbours. The upper
# neighbour's pattern is one more.

_Near: TypeAlias = tuple[NDArray[np.intp], NDArray[np.float64], NDArray[np.int64]]


def _midpoints_float32(products: NDArray[np.float64]) -> _Near:
    bits = products.view(np.int64).ravel()
    dropped, half = (1 << 29) - 1, 1 << 28  # float64 has 29 more bits than float32
    near = np.flatnonzero(((bits + (_CLOSE - half)) & dropped) <= 2 * _CLOSE)
    below = bits[near] & ~dropped & ((1 << 63) - 1)
    lower = below.view(np.float64).astype(np.float32).view(np.uint32).astype(np.int64)
    return near, (below | half).view(np.float64), lower


def _narrow_bfloat16(singles: NDArray[np.float32], out: NDArray[np.uint16], spare: NDArray[np.float32]) -> _Near:
    bits, part = singles.view(np.uint32), spare.view(np.uint32)
    np.bitwise_and(bits, np.uint32(0xFFFF), out=part)
    near = np.flatnonzero(part == np.uint32(0x8000))
    midpoints = np.abs(singles.ravel()[near]).astype(np.float64)
    lower = (bits.ravel()[near] & np.uint32(0x7FFFFFFF)).astype(np.int64) >> 16
    np.right_shift(bits, np.uint32(16), out=part)
    np.bitwise_and(part, np.uint32(1), out=part)
    bits += part  # one more where the lower neighbour is odd: ties go to even
    bits += np.uint32(0x7FFF)
    np.right_shift(bits, np.uint32(16), out=out, casting="unsafe")
    return near, midpoints, lower


def _narrow_float16(singles: NDArray[np.float32], out: NDArray[np.float16], spare: NDArray[np.float32]) -> _Near:
    with np.errstate(over="ignore", under="ignore"):
        out[...] = singles
    flat = np.abs(singles, out=spare).ravel()
    bits = flat.view(np.uint32)
    # Normal float16 drop 13 bits of a float32. Subnormal ones are multiples of 2^-24, their midpoints odd
    # multiples of 2^-25.
    normal = np.flatnonzero((bits & np.uint32(0x1FFF)) == np.uint32(0x1000))
    normal = normal[(flat[normal] >= _FLOAT16_TINY) & (flat[normal] <= _FLOAT16_LIMIT)]
    small = np.flatnonzero(flat < _FLOAT16_TINY)
    small = small[np.fmod(flat[small] * np.float32(2**25), np.float32(2)) == 1]
    near = np.concatenate([normal, small])
    midpoints = flat[near].astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        even = midpoints.astype(np.float16)
    lower = even.view(np.uint16).astype(np.int64) - (even > midpoints)
    return near, midpoints, lower


def _compare(
    exact: NDArray[np.float64], factor: NDArray[np.float64], root_exponent: int, midpoints: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the sign of ``exact * factor / sqrt(2^root_exponent) - midpoints``, all of them magnitudes."""
    scaled = factor * _reciprocal_root(root_exponent)
    product = exact * scaled
    # Exact where it decides anything: the two are within a factor of two (Sterbenz).
    distance = product - midpoints
    if root_exponent % 2 == 0:
        # Dekker's product: exact * scaled = product + error, without loss, since scaled has 11 bits.
        spread = exact * float((1 << 27) + 1)
        high = spread - (spread - exact)
        error = (high * scaled - product) + (exact - high) * scaled
        return np.sign(distance + error)
    side = np.sign(distance)
    # The root is irrational: compare squares where float64 cannot tell.
    for i in np.flatnonzero(np.abs(distance) <= np.spacing(midpoints) * _CLOSE):
        squared = (Fraction(float(exact[i])) * Fraction(float(factor[i]))) ** 2
        limit = Fraction(float(midpoints[i])) ** 2 * 2**root_exponent
        side[i] = (squared > limit) - (squared < limit)
    return side
