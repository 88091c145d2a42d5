"""What a wrong result looks like: the usual mistakes of a new decoder, recognised by what they give.

Each function returns "" or what is added to a message: "; it looks transposed". Nothing is proved by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.rotation import hadamard
from espalier_format.codec.tile import TILE
from espalier_format.conformance.module_case import ModuleCase
from espalier_format.conformance.outcome import Mismatch
from espalier_format.conformance.products import ProductCase

_COARSE: Final = "; all are close to it: something is rounded too coarsely"


def of_codes(got: NDArray[Any], expected: NDArray[Any], halfwords: NDArray[np.int16]) -> str:
    """Compare with the codes in another order, and tell where in a tile few wrong ones lie."""
    rows, columns = expected.shape
    tiles = expected.reshape(rows // TILE, TILE, columns // TILE, TILE)
    if got.shape == expected.T.shape and np.array_equal(got, expected.T):
        return "; the matrix is transposed"
    if np.array_equal(got, tiles.transpose(0, 3, 2, 1).reshape(rows, columns)):
        return "; each tile is transposed"
    if expected.dtype == np.int8 and not (got.astype(np.int64) + expected).any():
        return "; the signs are inverted"
    wrong = (got != expected).reshape(tiles.shape).any(axis=(1, 3))
    if wrong.sum() == 1:
        tile = tuple(int(index) for index in np.argwhere(wrong)[0])
        words = " ".join(f"{int(word) & 0xFFFF:04x}" for word in halfwords[tile][:4])
        return f"; all in the tile {tile[0]}, {tile[1]}, whose halfwords begin {words}"
    return ""


def of_shape(mismatch: Mismatch, case: ModuleCase) -> Mismatch:
    """Name the shapes that a weight has before it is cropped or transposed."""
    shapes = {
        (case.in_features, case.out_features): "it is transposed: the order is (out_features, in_features)",
        (case.padded_out, case.padded_in): "it is not cropped to the true size",
        (case.padded_in, case.padded_out): "it is neither transposed nor cropped to the true size",
    }
    for shape, text in shapes.items():
        if mismatch.got == str(shape):
            return Mismatch(f"{mismatch.message}: {text}", None, mismatch.expected, mismatch.got)
    return mismatch


def of_weight(got: NDArray[np.float64], case: ModuleCase, bound: NDArray[np.float64]) -> str:
    """Compare a weight with those that the usual mistakes give."""
    right = case.weight()
    if _near(got, right, bound):
        return _COARSE
    for text, weight in _mistakes(case):
        if weight.shape == got.shape and _near(got, weight, bound) and not _near(right, weight, bound):
            return f"; it looks like {text}"
    return of_places(got, right, bound)


def of_product(got: NDArray[np.float64], case: ProductCase, bound: NDArray[np.float64]) -> str:
    """Compare outputs with those that the usual mistakes give."""
    operands = case.operands()
    added = 0.0 if operands.bias is None else operands.bias.astype(np.float64)
    rows = operands.x.astype(np.float64)
    if operands.bias is not None and _near(got, operands.product - added, bound):
        return "; it looks like a product without its bias"
    if _near(got, operands.product, bound):
        return _COARSE
    for text, weight in _mistakes(case.module):
        if weight.shape != (got.shape[1], rows.shape[1]):
            continue
        product = rows @ weight.T + added
        if _near(got, product, bound) and not _near(operands.product, product, bound):
            return f"; it looks like the product with {text}"
    return of_places(got, operands.product, bound)


def _mistakes(case: ModuleCase) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Yield weights (out_features, in_features) as a wrong decoder would give them."""
    tensors, book = case.tensors(), case.book
    suh, svh = tensors.suh.astype(np.float64), tensors.svh.astype(np.float64)
    codes = case.codes().astype(np.float64)
    values = codes * book.value_scale
    blocks = (case.rotation_in, case.rotation_out)

    def weight(
        matrix: NDArray[np.float64], left: NDArray[np.float64], right: NDArray[np.float64], how: tuple[int, int]
    ) -> NDArray[np.float64]:
        rotated = _rotate(_rotate(matrix, how[0]).T, how[1]).T
        stored = rotated * left[:, None] * right / np.sqrt(float(max(how[0], 1) * max(how[1], 1)))
        return np.asarray(stored[: case.in_features, : case.out_features].T, dtype=np.float64)

    right = weight(values, suh, svh, blocks)
    yield "the transposed weight", right.T
    yield "the weight with inverted signs", -right
    yield "the weight without scales", weight(values, np.ones_like(suh), np.ones_like(svh), blocks)
    yield "the weight without suh", weight(values, np.ones_like(suh), svh, blocks)
    yield "the weight without svh", weight(values, suh, np.ones_like(svh), blocks)
    yield "the weight with the signs of its scales only", weight(values, np.sign(suh), np.sign(svh), blocks)
    yield "the weight with the magnitudes of its scales only", weight(values, np.abs(suh), np.abs(svh), blocks)
    yield "the weight without rotations", weight(values, suh, svh, (0, 0))
    yield "the weight without its input rotation", weight(values, suh, svh, (0, blocks[1]))
    yield "the weight without its output rotation", weight(values, suh, svh, (blocks[0], 0))
    factor = np.sqrt(float(max(blocks[0], 1) * max(blocks[1], 1)))
    yield "the weight without the factors 1/sqrt(block)", right * factor
    cropped = values.copy()
    cropped[case.in_features :] = 0
    cropped[:, case.out_features :] = 0
    yield "the weight with its padding taken for zero before the rotation", weight(cropped, suh, svh, blocks)
    if book.value_scale != 1:
        yield "the weight of codes that were not multiplied by value_scale", weight(codes, suh, svh, blocks)


def _rotate(matrix: NDArray[np.float64], block: int) -> NDArray[np.float64]:
    signs = hadamard(block).astype(np.float64)
    groups = matrix.reshape(-1, signs.shape[0], matrix.shape[1])
    return np.asarray((signs @ groups).reshape(matrix.shape), dtype=np.float64)


def _near(got: NDArray[np.float64], expected: NDArray[np.float64], bound: NDArray[np.float64]) -> bool:
    # Larger weights come with larger roundings than those the bound allows for.
    allowed = 4 * bound + 2.0**-6 * np.abs(expected)
    with np.errstate(invalid="ignore"):
        return bool((np.abs(got - expected) <= allowed).all())


def of_places(got: NDArray[np.float64], expected: NDArray[np.float64], bound: NDArray[np.float64]) -> str:
    """Tell where wrong numbers lie, if in one row or column, and whether they are numbers."""
    with np.errstate(invalid="ignore"):
        wrong = ~(np.abs(got - expected) <= bound)
    rows, columns = np.flatnonzero(wrong.any(axis=1)), np.flatnonzero(wrong.any(axis=0))
    if rows.size == 1 and columns.size > 1:
        return f"; all in row {rows[0]}"
    if columns.size == 1 and rows.size > 1:
        return f"; all in column {columns[0]}"
    if not np.isfinite(got[wrong]).all():
        return "; there are infinities or NaN among them"
    return ""
