"""Legacy packed signs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier_format.codec.signs import pack_signs, unpack_signs
from espalier_format.errors import DtypeError, LossyError, ShapeError


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-32768, 32767), min_size=0, max_size=20))
def test_unpack_bit_by_bit_and_pack_again(words: list[int]) -> None:
    packed = np.array(words, np.int16)
    scales = unpack_signs(packed)
    assert scales.dtype == np.float16
    assert scales.tolist() == [-1.0 if (word >> bit) & 1 else 1.0 for word in words for bit in range(16)]
    again = pack_signs(scales)
    assert again.dtype == np.int16
    assert again.tolist() == words
    assert np.array_equal(unpack_signs(packed.view(np.uint16)), scales)


@pytest.mark.parametrize("bad", [0.0, -0.0, 1.0009765625, -0.99951171875, 2.0, np.inf, np.nan])
def test_lossy_error_for_any_other_magnitude(bad: float) -> None:
    scales = np.ones(32, np.float16)
    scales[17] = bad
    with pytest.raises(LossyError):
        pack_signs(scales)


def test_wrong_dtypes_and_shapes() -> None:
    for array in (np.zeros(2, np.int32), np.zeros(2, np.float16)):
        with pytest.raises(DtypeError):
            unpack_signs(array)
    with pytest.raises(ShapeError):
        unpack_signs(np.zeros((2, 1), np.int16))
    with pytest.raises(DtypeError):
        pack_signs(np.ones(16, np.float32))
    for shape in ((15,), (16, 1)):
        with pytest.raises(ShapeError):
            pack_signs(np.ones(shape, np.float16))
