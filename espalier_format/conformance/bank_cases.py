"""Which expert banks the kit computes: tokens, their experts, and the exact outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.rounding import OutputDtype
from espalier_format.conformance import noise
from espalier_format.conformance.checkpoints import KitBank, KitCheckpoint, kit_checkpoints
from espalier_format.conformance.module_case import DTYPES
from espalier_format.conformance.tolerance import BANK, row_lengths

_SLOPE: Final = 1.1
"""The derivative of silu is nowhere larger."""


@dataclass(frozen=True, slots=True)
class BankCase:
    """Tokens through one bank: y = Σ w · down(silu(gate(x)) · up(x)) over the experts of each token.

    Everything follows from these fields. ``scale`` multiplies the inputs.
    """

    checkpoint: KitCheckpoint
    bank: KitBank
    tokens: int
    experts_per_token: int
    scale: float = 1.0

    @property
    def label(self) -> str:
        """Its name."""
        scaled = "" if self.scale == 1 else f"-times-{self.scale:g}"
        return f"{self.checkpoint.name}/{self.bank.name}/tokens{self.tokens}-experts{self.experts_per_token}{scaled}"

    def operands(self) -> BankOperands:
        """Return inputs and outputs; those of the last few cases are remembered."""
        return _operands(self)


@dataclass(frozen=True, slots=True, eq=False)
class BankOperands:
    """float32 (tokens, hidden), int64 (tokens, k), float32 (tokens, k), float64 (tokens, hidden), bounds by dtype."""

    x: NDArray[np.float32]
    """Exact in float16 and bfloat16 too."""
    expert_ids: NDArray[np.int64]
    """Different experts for each token."""
    expert_weights: NDArray[np.float32]
    """Positive; exact in float16 and bfloat16 too."""
    y: NDArray[np.float64]
    bounds: dict[OutputDtype, NDArray[np.float64]]
    """How far outputs may be from y (spec/conformance.md §7.1)."""


@lru_cache(maxsize=1)
def bank_cases() -> tuple[BankCase, ...]:
    """Return all cases: each bank with one token, a few, and more than a tile has rows."""
    found = []
    for checkpoint in kit_checkpoints():
        for bank in checkpoint.banks:
            for tokens, experts, scale in ((1, 2, 1.0), (5, 3, 0.5), (20, 2, 0.125)):
                found.append(BankCase(checkpoint, bank, tokens, experts, scale))
    return tuple(found)


def _weight(case: BankCase, expert: int, number: int) -> NDArray[np.float64]:
    """Return the exact weight of a projection, (out_features, in_features), of a plain expert too."""
    name, inputs, outputs = case.bank.projections[number]
    full = f"{case.bank.name}.{expert}.{name}"
    module = case.bank.modules(case.checkpoint.name).get(full)
    if module is not None:
        return module.weight()
    label = f"{case.checkpoint.name}/{full}.weight"
    return noise.activations(label, 1, inputs * outputs).reshape(outputs, inputs).astype(np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class _Product:
    """x Wᵀ, and √(Σ_k (x[r, k] W[n, k])²): what errors without a common sign add up to."""

    value: NDArray[np.float64]
    length: NDArray[np.float64]
    row_length: NDArray[np.float64]

    @classmethod
    def of(cls, x: NDArray[np.float64], weight: NDArray[np.float64]) -> _Product:
        value = np.array([[math.fsum(terms) for terms in (weight * row).tolist()] for row in x])
        return cls(value, _lengths(x, weight), row_lengths(x)[:, None])

    def bound(self, dtype: OutputDtype) -> NDArray[np.float64]:
        """Return how far a product in that dtype may be from this one."""
        allowed = BANK[dtype]
        steps = allowed.absolute * (1 + 2 * self.row_length)
        bound: NDArray[np.float64] = allowed.relative * np.abs(self.value) + allowed.spread * self.length + steps
        return bound


def _lengths(x: NDArray[np.float64], weight: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([row_lengths(weight * row) for row in x])


def _silu(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return x / (1 + exp(-x)), rounded once: libraries differ in the last bit of exp."""
    with localcontext() as context:
        context.prec = 40
        exact = [[float(Decimal(value) / (1 + (-Decimal(value)).exp())) for value in row] for row in values.tolist()]
    return np.array(exact).reshape(values.shape)


@lru_cache(maxsize=2)
def _operands(case: BankCase) -> BankOperands:
    count, hidden = len(case.bank.assignment[0]), case.bank.projections[0][1]
    x = noise.activations(f"{case.label}/x", case.tokens, hidden) * np.float32(case.scale)
    order = noise.halfwords(f"{case.label}/experts", case.tokens * count).reshape(case.tokens, count)
    expert_ids = np.argsort(order, axis=1, kind="stable")[:, : case.experts_per_token].astype(np.int64)
    raw = noise.halfwords(f"{case.label}/weights", expert_ids.size).reshape(expert_ids.shape)
    expert_weights = ((raw & 63) + 1).astype(np.float32) / np.float32(64)
    parts: list[list[list[float]]] = [[[] for _ in range(hidden)] for _ in range(case.tokens)]
    bounds = {dtype: np.zeros((case.tokens, hidden)) for dtype in DTYPES}
    for expert in range(count):
        tokens, places = np.nonzero(expert_ids == expert)
        if not tokens.size:
            continue
        shares = expert_weights[tokens, places].astype(np.float64)
        rows = x[tokens].astype(np.float64)
        gate, up, down = (_weight(case, expert, number) for number in range(3))
        gated, upped = _Product.of(rows, gate), _Product.of(rows, up)
        activated = _silu(gated.value)
        inner = activated * upped.value
        output = _Product.of(inner, down)
        for token, share, values in zip(tokens.tolist(), shares.tolist(), output.value.tolist(), strict=True):
            for terms, value in zip(parts[token], values, strict=True):
                terms.append(share * value)
        for dtype in DTYPES:
            off_gate, off_up = _SLOPE * gated.bound(dtype), upped.bound(dtype)
            off_inner = (
                BANK[dtype].relative * np.abs(inner)
                + off_gate * np.abs(upped.value)
                + off_up * np.abs(activated)
                + off_gate * off_up
            )
            off_output = output.bound(dtype) + _lengths(off_inner, down)
            for token, share, bound in zip(tokens.tolist(), shares.tolist(), off_output, strict=True):
                bounds[dtype][token] += share * bound
    y = np.array([[math.fsum(terms) for terms in row] for row in parts])
    for dtype in DTYPES:
        bounds[dtype] += BANK[dtype].relative * np.abs(y) + BANK[dtype].absolute
    for array in (x, expert_ids, expert_weights, y, *bounds.values()):
        array.flags.writeable = False
    return BankOperands(x, expert_ids, expert_weights, y, bounds)
