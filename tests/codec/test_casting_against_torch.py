"""Casts of all 65,536 F16 and BF16 values against torch's, and of ties against exact fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from espalier_format.codec.casting import cast_floats
from espalier_format.errors import ScaleOverflowError

ALL = np.arange(1 << 16, dtype=np.uint16)
TORCH = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
BITS = {"F16": np.dtype("u2"), "BF16": np.dtype("u2"), "F32": np.dtype("u4")}


def as_held(bits: np.ndarray, dtype: str) -> np.ndarray:
    return bits.view(np.float16) if dtype == "F16" else bits


def by_torch(bits: np.ndarray, source: str, target: str) -> tuple[np.ndarray, np.ndarray]:
    """Torch's cast of the same bits: (result bits, which are NaN)."""
    values = torch.from_numpy(bits.view(np.int16).copy()).view(TORCH[source]).to(TORCH[target])
    held = values.view(torch.int32 if target == "F32" else torch.int16).numpy().view(BITS[target])
    return held, torch.isnan(values).numpy()


@pytest.mark.parametrize(("source", "target"), [("F16", "BF16"), ("F16", "F32"), ("BF16", "F32"), ("F16", "F16")])
def test_casts_of_all_values_are_torchs(source: str, target: str) -> None:
    """NaN payloads are not compared: torch has its own."""
    got = cast_floats(as_held(ALL, source), source, target, name="t").view(BITS[target])
    want, nan = by_torch(ALL, source, target)
    assert np.array_equal(got[~nan], want[~nan])
    infinity = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F800000}[target]
    magnitude = got & (np.iinfo(got.dtype).max >> 1)
    assert (magnitude > infinity)[nan].all()
    assert nan.sum() == {"F16": 2 * 1023, "BF16": 2 * 127}[source]


def test_bfloat16_to_float16_of_all_values_is_torchs() -> None:
    wide = (ALL.astype(np.uint32) << 16).view(np.float32)
    fits = ~np.isfinite(wide) | (np.abs(wide) < 65520)
    got = cast_floats(ALL[fits], "BF16", "F16", name="t").view(np.uint16)
    want, nan = by_torch(ALL[fits], "BF16", "F16")
    assert np.array_equal(got[~nan], want[~nan])
    assert np.isnan(got.view(np.float16)[nan]).all()
    assert fits.sum() > 1 << 15


@pytest.mark.parametrize("value", [65536.0, -65536.0, 3.0e38])
def test_scale_overflow_error_names_tensor_and_value(value: float) -> None:
    bits = np.array([value], np.float32).view(np.uint32) >> np.uint32(16)
    with pytest.raises(ScaleOverflowError, match=r"router\.weight.*too large for F16") as refusal:
        cast_floats(bits.astype(np.uint16), "BF16", "F16", name="router.weight")
    assert refusal.value.tensor == "router.weight"
    assert refusal.value.got == float((bits << np.uint32(16)).view(np.float32)[0])


def test_infinity_is_not_an_overflow() -> None:
    got = cast_floats(np.array([0x7F80, 0xFF80], np.uint16), "BF16", "F16", name="t")
    assert got.tolist() == [np.inf, -np.inf]


def test_ties_go_to_even() -> None:
    """Every F16 with more than 8 significant bits, rounded by exact fractions."""
    halves = ALL[(ALL & 0x7C00 != 0) & (ALL < 0x7C00)].view(np.float16)
    got = cast_floats(halves, "F16", "BF16", name="t").astype(np.uint32) << 16
    for value, rounded in zip(halves[::37].tolist(), got.view(np.float32)[::37].tolist(), strict=True):
        exponent = int(np.floor(np.log2(value)))
        step = Fraction(2) ** (exponent - 7)
        assert Fraction(rounded) == round(Fraction(value) / step) * step


def test_wider_dtypes_take_narrower_ones_exactly() -> None:
    halves = ALL[ALL & 0x7C00 != 0x7C00].view(np.float16)
    assert cast_floats(halves, "F16", "F64", name="t").tolist() == halves.tolist()
