"""How far a decoder within tolerance may be from the exact numbers (spec/rotation.md §6, spec/conformance.md §7)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.rounding import OutputDtype


class Allowance(NamedTuple):
    """The three terms of a tolerance."""

    relative: float
    """r: of the magnitude of the exact number."""
    spread: float
    """t: of the magnitude of the terms that it is the sum of."""
    absolute: float
    """m."""


LARGEST_VALUE: Final[Mapping[str, float]] = {
    "e2m1": 6.0,
    "int5": 14.0,
    "int6": 30.0,
    "int8": 123.0,
    "exl3-3inst": 3.97265625,
    "exl3-mcg": 3.94921875,
    "exl3-mul1": 3.453125,
}
"""G: family to the largest magnitude of a value of its codebooks."""

WEIGHT: Final[Mapping[OutputDtype, Allowance]] = {
    "float32": Allowance(2.0**-22, 2.0**-20, 0.0),
    "float16": Allowance(2.0**-9, 2.0**-10, 2.0**-24),
    "bfloat16": Allowance(2.0**-7, 2.0**-10, 0.0),
}
"""Output dtype to what weights are allowed."""

PRODUCT: Final[Mapping[OutputDtype, Allowance]] = {
    "float32": Allowance(2.0**-20, 2.0**-16, 0.0),
    "float16": Allowance(2.0**-9, 2.0**-9, 2.0**-24),
    "bfloat16": Allowance(2.0**-7, 2.0**-7, 0.0),
}
"""Dtype of the inputs to what products are allowed."""

BANK: Final[Mapping[OutputDtype, Allowance]] = {
    "float32": Allowance(2.0**-20, 2.0**-16, 0.0),
    "float16": Allowance(2.0**-9, 2.0**-8, 2.0**-24),
    "bfloat16": Allowance(2.0**-7, 2.0**-6, 0.0),
}
"""Dtype of the inputs to what the products within an expert bank are allowed; here the spread is that of the terms
themselves."""


def row_lengths(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the Euclidean length of each row: to the last bit the same on every machine."""
    return np.array([math.sqrt(math.fsum(row)) for row in np.square(matrix).tolist()])


def weight_bound(
    weight: NDArray[np.float64], suh: NDArray[np.float16], svh: NDArray[np.float16], family: str, dtype: OutputDtype
) -> NDArray[np.float64]:
    """Return the largest allowed distance of each weight from the exact one: float64 (out_features, in_features).

    Where a scale is zero, it is zero.
    """
    allowed = WEIGHT[dtype]
    outputs, inputs = weight.shape
    scales = np.abs(svh[:outputs].astype(np.float64)[:, None] * suh[:inputs].astype(np.float64))
    bound = allowed.relative * np.abs(weight) + allowed.spread * LARGEST_VALUE[family] * scales
    return np.where(scales == 0, 0.0, bound + allowed.absolute)


def product_bound(
    product: NDArray[np.float64],
    x: NDArray[np.floating[Any]],
    suh: NDArray[np.float16],
    svh: NDArray[np.float16],
    bias: NDArray[np.float32] | None,
    family: str,
    dtype: OutputDtype,
) -> NDArray[np.float64]:
    """Return the largest allowed distance of each output from the exact one: float64 (rows, out_features).

    ``product`` is the exact output with its bias. An output whose svh is zero and that has no bias is zero.
    """
    allowed = PRODUCT[dtype]
    outputs, inputs = product.shape[1], x.shape[1]
    rows = x.astype(np.float64)
    lengths = row_lengths(rows * suh[:inputs].astype(np.float64))
    spread = LARGEST_VALUE[family] * lengths[:, None] * np.abs(svh[:outputs].astype(np.float64))
    added = np.zeros(outputs) if bias is None else np.abs(bias.astype(np.float64))
    # Weights in float16 may each be off by a subnormal step.
    steps = allowed.absolute * (1 + 2 * row_lengths(rows))[:, None]
    bound = allowed.relative * (np.abs(product) + added) + allowed.spread * spread + steps
    return np.where((spread == 0) & (added == 0), 0.0, bound)
