"""Which products the kit computes: inputs, a quantized module, a bias, and the exact outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.codebook import CODEBOOKS
from espalier_format.codec.rounding import OutputDtype
from espalier_format.conformance import noise
from espalier_format.conformance.module_case import DTYPES, ModuleCase
from espalier_format.conformance.modules import weight_modules

Inputs = Literal["usual", "unit", "zero", "outlier", "large", "tiny"]
"""What the inputs of a product are like; `ProductCase.inputs` says it of each."""

_ROWS: Final = (1, 2, 3, 8, 9, 17)


_EDGES: Final[tuple[tuple[str, int, bool, Inputs], ...]] = (
    ("e2m1@2/in64-", 9, False, "unit"),
    ("int5@3/in128-", 17, True, "unit"),
    ("int6@4/in256-", 4, True, "zero"),
    ("int6@4/in32-", 5, False, "outlier"),
    ("exl3-mul1@4/in128-", 8, True, "outlier"),
    ("int5@3/in64-", 3, True, "large"),
    ("e2m1@1/in256-", 16, False, "large"),
    ("int8@6/in0-", 3, False, "tiny"),
    ("exl3-3inst@5/in128-", 2, True, "tiny"),
    ("edge/all-outputs-zero", 3, False, "usual"),
    ("edge/all-outputs-zero", 3, True, "usual"),
    ("edge/numbers-in-the-padding", 5, True, "usual"),
    ("edge/numbers-in-the-padding-unrotated", 2, False, "usual"),
    ("edge/steep-scales", 4, False, "usual"),
    ("edge/steep-scales-rotated", 9, True, "usual"),
    ("edge/one-by-one", 1, True, "usual"),
    ("edge/one-output", 7, False, "usual"),
    ("edge/one-input", 3, True, "usual"),
    ("edge/two-blocks-of-256", 6, True, "usual"),
    ("edge/larger", 33, False, "usual"),
    ("edge/larger", 65, True, "usual"),
    ("edge/steep-scales", 200, True, "usual"),
    ("edge/steep-scales-rotated", 65, False, "usual"),
    ("edge/subnormal-float16", 200, False, "usual"),
)
"""Beginning of the label of a module, rows, whether there is a bias, inputs."""


@dataclass(frozen=True, slots=True)
class ProductCase:
    """One product y = x Wᵀ + bias: everything follows from these fields."""

    label: str
    module: ModuleCase
    rows: int
    bias: bool
    inputs: Inputs = "usual"
    """"usual": about uniform in (-2, 2). "unit": row r is zero but for a one, so that outputs are weights. "zero": all
    zero. "outlier": usual, with 2^12 in one place of each row. "large": usual times 2^18, beyond float16. "tiny": usual
    times 2^-20, mostly subnormal in float16."""

    @property
    def dtypes(self) -> tuple[OutputDtype, ...]:
        """The dtypes in which the inputs are exact, and can be given."""
        return ("float32", "bfloat16") if self.inputs in ("large", "tiny") else DTYPES

    def operands(self) -> ProductOperands:
        """Return inputs, bias and outputs; those of the last few products are remembered."""
        return _operands(self)


@dataclass(frozen=True, slots=True, eq=False)
class ProductOperands:
    """float32 (rows, in_features), float32 (out_features,) or None, float64 (rows, out_features)."""

    x: NDArray[np.float32]
    bias: NDArray[np.float32] | None
    product: NDArray[np.float64]
    """The exact product by the reference: the weights have a relative error below 2^-50, the products of float64 with
    them one of 2^-53, and their sum is rounded once."""


@lru_cache(maxsize=1)
def product_cases() -> tuple[ProductCase, ...]:
    """Return all products: for each codebook two of the modules of `weight_modules`, then the inputs at the edge."""
    modules = weight_modules()
    found = []
    for number, name in enumerate(CODEBOOKS):
        own = [module for module in modules if module.label.startswith(f"{name}/")]
        for turn in range(2):
            module = own[(number + 2 * turn) % len(own)]
            rows = _ROWS[(2 * number + turn) % len(_ROWS)]
            found.append(ProductCase(module.label, module, rows, bias=(number + turn) % 2 == 1))
    for label, rows, bias, inputs in _EDGES:
        module = next(module for module in modules if module.label.startswith(label))
        how = ("" if inputs == "usual" else f"-{inputs}-inputs") + ("-bias" if bias else "")
        found.append(ProductCase(f"{module.label}{how}", module, rows, bias, inputs))
    return tuple(found)


@lru_cache(maxsize=4)
def _operands(case: ProductCase) -> ProductOperands:
    module = case.module
    x = noise.activations(f"{case.label}/x", case.rows, module.in_features)
    match case.inputs:
        case "unit":
            x[:] = 0
            x[np.arange(case.rows), np.arange(case.rows) * 7 % module.in_features] = 1
        case "zero":
            x[:] = 0
        case "outlier":
            x[np.arange(case.rows), np.arange(case.rows) * 5 % module.in_features] = 4096
        case "large":
            x *= np.float32(2**18)
        case "tiny":
            x *= np.float32(2**-20)
        case _:
            pass
    bias = noise.activations(f"{case.label}/bias", 1, module.out_features)[0] if case.bias else None
    weight = module.weight()
    rows = x.astype(np.float64)
    added = [0.0] * module.out_features if bias is None else bias.astype(np.float64).tolist()
    # math.fsum: the sum is the same, to the last bit, on every machine and with every library.
    product = np.array(
        [
            [math.fsum([*terms, start]) for terms, start in zip((weight * row).tolist(), added, strict=True)]
            for row in rows
        ]
    )
    for array in (x, product, *(() if bias is None else (bias,))):
        array.flags.writeable = False
    return ProductOperands(x, bias, product)
