"""cast_floats against the definition of the formats: all narrow values, random and special wider ones."""

from __future__ import annotations

import numpy as np
import pytest

from espalier_format.codec.casting import FLOAT_DTYPES, cast_floats
from espalier_format.errors import ScaleOverflowError, UsageError

# dtype: (significand bits with the hidden one, exponent of the smallest step)
FORMATS = {"F16": (11, -24), "BF16": (8, -133), "F32": (24, -149), "F64": (53, -1074)}


def nearest(values: np.ndarray, dtype: str) -> np.ndarray:
    """Round float64 to nearest even from the definition of a format; the largest value is not looked at.

    Exact: dividing by a power of two loses nothing, and rint rounds half to even.
    """
    bits, smallest = FORMATS[dtype]
    _, exponents = np.frexp(values)
    steps = np.ldexp(1.0, np.maximum(exponents - bits, smallest))
    return np.rint(values / steps) * steps


def as_float64(values: np.ndarray, dtype: str) -> np.ndarray:
    return ((values.astype("<u4") << 16).view("<f4") if dtype == "BF16" else values).astype(np.float64)


def interesting(dtype: str) -> np.ndarray:
    """Values of F32 or F64 that lie on, just below and just above the midpoints of narrower formats."""
    rng = np.random.default_rng(5)
    found = [0.0, -0.0, 1e-46, -1e-50, 65504.0, 65519.9, 3.3e38]
    for exponent in (-149, -140, -134, -133, -127, -126, -25, -24, -15, -14, -1, 0, 5, 14):
        for significand in (1, 3, 128, 129, 255, 256, 1023, 1025, 2047, 2048, 2**24 - 1):
            middle = (significand + 0.5) * 2.0**exponent
            found += [middle, -middle]
    values = np.array(found + list(rng.normal(size=500) * 2.0 ** rng.integers(-30, 14, 500)), dtype=FLOAT_DTYPES[dtype])
    values = values[np.abs(values) < 65000]
    return np.concatenate([values, np.nextafter(values, np.inf), np.nextafter(values, -np.inf)]).astype(values.dtype)


@pytest.mark.parametrize(
    ("source", "target"), [("F32", "F16"), ("F32", "BF16"), ("F64", "F16"), ("F64", "BF16"), ("F64", "F32")]
)
def test_narrowing_rounds_once_to_nearest_even(source: str, target: str) -> None:
    """For F64 to BF16, rounding by way of float32 would fail on the values beside midpoints."""
    values = interesting(source)
    result = cast_floats(values, source, target, name="x")
    assert result.dtype == FLOAT_DTYPES[target]
    assert as_float64(result, target).tobytes() == nearest(as_float64(values, source), target).tobytes()


@pytest.mark.parametrize("source", ["F16", "BF16"])
@pytest.mark.parametrize("target", ["F16", "BF16", "F32", "F64"])
def test_every_value_of_the_narrow_formats(source: str, target: str) -> None:
    patterns = np.arange(65536, dtype=np.uint16)
    values = patterns if source == "BF16" else patterns.view(np.float16)
    exponent = 0x7F80 if source == "BF16" else 0x7C00
    values = values[(patterns & exponent) != exponent]
    if (source, target) == ("BF16", "F16"):
        values = values[(values & 0x7FFF) < 0x4780]
    result = cast_floats(values, source, target, name="x")
    assert as_float64(result, target).tobytes() == nearest(as_float64(values, source), target).tobytes()


@pytest.mark.parametrize(
    ("source", "target", "value"),
    [("F32", "F16", 65520.0), ("F64", "F32", 3.5e38), ("F64", "BF16", 3.4e38), ("F32", "BF16", -3.4e38)],
)
def test_overflow_is_refused(source: str, target: str, value: float) -> None:
    with pytest.raises(ScaleOverflowError, match="weights"):
        cast_floats(np.array([1, value], FLOAT_DTYPES[source]), source, target, name="weights")


def test_the_largest_values_that_fit() -> None:
    assert cast_floats(np.array([65519.99], "<f8"), "F64", "F16", name="x")[0] == 65504
    below = np.nextafter(np.float64((2**9 - 1) * 2.0**119), 0)
    assert cast_floats(np.array([below]), "F64", "BF16", name="x")[0] == 0x7F7F


@pytest.mark.parametrize("source", ["F16", "BF16", "F32", "F64"])
@pytest.mark.parametrize("target", ["F16", "BF16", "F32", "F64"])
def test_infinities_and_nan_stay(source: str, target: str) -> None:
    stored = [0x7F80, 0xFF80, 0x7FC0, 0x7F81] if source == "BF16" else [np.inf, -np.inf, np.nan, np.nan]
    values = np.array(stored, FLOAT_DTYPES[source])
    result = cast_floats(values, source, target, name="x")
    wide = (result.astype("<u4") << 16).view("<f4") if target == "BF16" else result
    assert wide[0] == np.inf
    assert wide[1] == -np.inf
    assert np.isnan(wide[2:]).all()


def test_shapes_are_kept() -> None:
    assert cast_floats(np.zeros((2, 0, 3), "<f8"), "F64", "BF16", name="x").shape == (2, 0, 3)
    assert cast_floats(np.float32(3).reshape(()), "F32", "BF16", name="x").shape == ()


@pytest.mark.parametrize("pair", [("I32", "F16"), ("F16", "F8_E4M3")])
def test_other_dtypes_are_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(UsageError):
        cast_floats(np.zeros(1, "<f2"), *pair, name="x")
