"""The integer branch cost: what a step to a state costs, the same number in every back end.

Real arithmetic would make back ends disagree on near ties, so the search runs on integers. Everything real
is rounded once, here, before a back end sees it:

1. A code c becomes the fixed-point number ``c' = rint(c * units)``, an integer of at most 15 bits and a sign.
2. A target t, to be approximated by ``scale * value_scale * c``, becomes ``t' = rint(t * (units / (scale *
   value_scale)))`` in float64, clamped to ``[min c' - reach, max c' + reach]``. Both roundings are to nearest, ties
   to even. A clamped target still tells apart the codes that are nearest to it.
3. A step to a state of code c' costs, in unbounded integers,

       cost(t', c') = ((min(|t' - c'|, limit) << shift)^2) >> drop

A path costs the sum of its steps. The encoder minimises that sum; of equal sums it takes, at every state, the
path through the lowest predecessor, and at the end of a free pass the lowest state.

**Two precisions.** Up to 4 bits per weight ``drop`` is 16 and costs are *narrow*: path metrics fit 16 bits, and
a step's cost is the high half of a 16-bit square. From 5 bits up the squared errors that matter differ by a
factor beyond that, so ``drop`` is 0 and costs are *wide*: 32 bits. The unit of a narrow cost is 1/16 of the
squared error that the width can reach at best (4^-bits of the variance, for a Gaussian). Against costs of nearly
full precision that changes the error of normal samples by less than 0.03 %, and of Laplacian ones too.

**Shortcut.** A cost depends on the state through its code alone: a step has as many costs as the codebook has
levels (15 for e2m1, 29 for int5), and a back end may look them up instead of computing them.

**Bound.** Let C be the largest cost, ``((limit << shift)^2) >> drop``, and N the steps that take in 16 new bits
(`mixing_steps`). Any state can be reached from any other in N steps, for at most N * C, and no cost is negative.
So after N steps from wherever the path began, metrics differ by at most N * C, and a back end may subtract the
smallest metric from all of them, even one that is two steps old, and stays within (N + 2) * C. ``limit`` is the
largest with (N + 2) * C < 2^15 (narrow) or 2^31 (wide): sums and one more cost fit an unsigned number of twice
that, and comparisons may even be signed. A fixed start state is a metric of 0 among metrics of
``unreachable`` = 2^15 or 2^31: a path from elsewhere still costs more than N * C where the paths meet, so it is
never chosen, and within N steps it is gone.

A back end needs no more than `BranchCost.codes`, the targets in fixed point, `limit`, `shift`, `drop` and `bits`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import isqrt
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.codebook import Codebook
from espalier_format.codec.trellis import step_bits

_SIGMA: Final = {
    "e2m1": 4.53,
    "int5": 4.69,
    "int6": 9.67,
    "int8": 33.4,
    "exl3-3inst": 1.244,
    "exl3-mcg": 1.244,
    "exl3-mul1": 1.0,
}
"""About the standard deviation of a family's codes: the width's resolution is chosen relative to it."""

_WIDE_HALF_STEPS: Final = 10
"""Twice the width from which costs are wide."""


@dataclass(frozen=True, slots=True, eq=False)
class BranchCost:
    """The branch costs of one codebook: the constants of the module's rule, and the codes in fixed point."""

    codebook: Codebook
    units: int
    """Fixed-point units per code."""
    codes: NDArray[np.int16]
    """c' of every state, (65536,), read-only."""
    limit: int
    """Largest distance |t' - c'| that is told apart."""
    shift: int
    drop: int
    """0: wide costs; 16: narrow ones."""
    reach: int
    """How far beyond the outermost codes a target may lie."""
    mixing_steps: int
    """N: any N consecutive steps take in at least 16 new bits."""
    bits: NDArray[np.int64]
    """New bits of each of the 256 ring positions."""

    @property
    def wide(self) -> bool:
        """Whether metrics need 32 bits (else 16)."""
        return self.drop == 0

    @property
    def largest(self) -> int:
        """C: the largest cost of a step."""
        return ((self.limit << self.shift) ** 2) >> self.drop

    @property
    def unreachable(self) -> int:
        """The metric that stands for "no path from the start state"."""
        return 1 << (31 if self.wide else 15)

    def fixed_point(self, targets: NDArray[Any], scale: float) -> NDArray[np.int16]:
        """Return t' of finite ``targets``, any shape, for a reproduction of ``scale * value``."""
        factor = self.units / (scale * self.codebook.value_scale)
        low, high = int(self.codes.min()) - self.reach, int(self.codes.max()) + self.reach
        return np.clip(np.rint(targets.astype(np.float64, order="C") * factor), low, high).astype(np.int16)

    def of(self, target: int, codes: NDArray[np.int16]) -> NDArray[np.int64]:
        """Return the cost of each of ``codes`` for the fixed-point ``target``: the definition."""
        distance = np.minimum(np.abs(target - codes.astype(np.int64)), self.limit)
        return ((distance << self.shift) ** 2) >> self.drop


@cache
def branch_cost(codebook: Codebook) -> BranchCost:
    """Return the branch costs of a codebook."""
    bits = step_bits(codebook.half_steps)
    # Half-integer widths alternate; the longest run of steps within 16 bits starts at a narrow one.
    mixing_steps = int(np.searchsorted(np.cumsum(bits), 16)) + 1
    wide = codebook.half_steps >= _WIDE_HALF_STEPS
    # Per standard deviation: 2^(10 + bits) units after the shift, so that a narrow cost of 1 is 4^-bits / 16.
    shift = 0 if wide else max(codebook.half_steps - 3, 0) // 2
    per_sigma = 4096.0 if wide else 2.0 ** (10 + codebook.half_steps / 2 - shift)
    units = round(per_sigma / _SIGMA[codebook.family])
    codes = np.rint(codebook.codes.astype(np.float64) * units).astype(np.int16)
    codes.flags.writeable = False
    drop = 0 if wide else 16
    largest = ((1 << (31 if wide else 15)) - 1) // (mixing_steps + 2)
    limit = isqrt(((largest + 1) << drop) - 1) >> shift
    # A narrow difference t' - c' must fit 16 bits and a sign; a wide one fits 32 anyway.
    room = limit if wide else (1 << 15) - 1 - 2 * int(np.abs(codes.astype(np.int64)).max())
    return BranchCost(codebook, units, codes, limit, shift, drop, min(limit // 2, room), mixing_steps, bits)
