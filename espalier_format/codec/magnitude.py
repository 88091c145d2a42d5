"""How large exact weights can be: a bound that follows from scales alone (spec/rotation.md §5.1).

Decoders are within tolerance of them (§6), and may round one just below `FLOAT16_OVERFLOW` to an infinity.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Final

import numpy as np

from espalier_format.codec.codebook import Codebook

FLOAT16_OVERFLOW: Final = 65520.0
"""The first magnitude that overflows float16."""


@cache
def largest_value(codebook: Codebook) -> float:
    """Return the largest magnitude of a value of a codebook."""
    return float(np.abs(codebook.codes.astype(np.float64)).max()) * codebook.value_scale


def weight_limit(
    codebook: Codebook, rotation_in: int, rotation_out: int, largest_suh: float, largest_svh: float
) -> float:
    """Return what no exact weight of a module exceeds, whose true scales have these largest magnitudes.

    A row of a rotation has the length 1, so that the magnitudes of a block of b values add up to sqrt(b) times the
    largest. Everything is exact in float64 but the root and the last product.
    """
    root = math.sqrt(max(rotation_in, 1) * max(rotation_out, 1))
    return largest_value(codebook) * root * (largest_suh * largest_svh)


def may_overflow_float16(
    codebook: Codebook, rotation_in: int, rotation_out: int, largest_suh: float, largest_svh: float
) -> bool:
    """Tell whether an exact weight could be too large for float16; if not, none is. Arguments as of `weight_limit`."""
    # A little less than the limit: two roundings.
    limit = weight_limit(codebook, rotation_in, rotation_out, largest_suh, largest_svh)
    return limit >= FLOAT16_OVERFLOW * (1 - 2.0**-40)
