"""Rotation blocks."""

from __future__ import annotations

import numpy as np
import pytest

from espalier_format.codec.rotation import BLOCKS, hadamard, kronecker_factors, padded
from espalier_format.errors import UsageError


@pytest.mark.parametrize("block", [32, 64, 128, 256])
def test_hadamard_by_its_definition(block: int) -> None:
    matrix = hadamard(block)
    assert matrix.dtype == np.int8
    assert matrix.tolist() == [[1 - 2 * ((i & j).bit_count() % 2) for j in range(block)] for i in range(block)]
    wide = matrix.astype(np.int64)
    assert np.array_equal(wide @ wide, block * np.eye(block, dtype=np.int64))


def test_no_rotation_is_the_unit_matrix() -> None:
    assert hadamard(0).tolist() == [[1]]


@pytest.mark.parametrize("block", BLOCKS)
def test_kronecker_factors(block: int) -> None:
    between, within = kronecker_factors(block)
    assert within.shape == (16, 16)
    assert np.array_equal(np.kron(between, within), hadamard(block) if block else np.eye(16))
    for array in (between, within, hadamard(block)):
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 0


@pytest.mark.parametrize(
    ("size", "block", "expected"),
    [(1, 0, 16), (16, 0, 16), (17, 0, 32), (576, 64, 576), (577, 64, 640), (100, 128, 128), (1, 256, 256), (0, 32, 0)],
)
def test_padded(size: int, block: int, expected: int) -> None:
    assert padded(size, block) == expected


@pytest.mark.parametrize("block", [1, 2, 16, 48, 127, 512, -32])
def test_other_blocks_are_refused(block: int) -> None:
    for function in (hadamard, kronecker_factors, lambda b: padded(10, b)):
        with pytest.raises(UsageError):
            function(block)
