"""The numpy decoder: exact codes and correctly rounded weights, in bounded memory, without torch.

Weights are rounded **once**, to nearest even, from the exact real value. That is possible because the
signed sums of the rotation are exact in float64: a codebook's values are multiples of 2^-17 (exl3-mul1),
2^-13 (the other EXL3 codebooks) or 1 (grids, as codes) below 4 or 128, so a sum of at most 256 x 256 of them
spans at most 2 + 17 + 16 = 35 bits (`codec.rounding.MAX_SUM_BITS` is 42). Every partial sum is exact as
well, so neither the order of additions nor the BLAS library matters.

Threads: with ``threads`` > 1 blocks are decoded by a thread pool; numpy releases the interpreter lock. The
BLAS that numpy was built with may start threads of its own for the rotations; this module leaves that
setting alone. To use one core exactly, set OMP_NUM_THREADS, OPENBLAS_NUM_THREADS and MKL_NUM_THREADS to 1
before Python starts, or use threadpoolctl.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.codebook import Codebook, get_codebook
from espalier_format.codec.dtype_names import DtypeName, parse_dtype
from espalier_format.codec.rotation import padded
from espalier_format.codec.rounding import scale_and_round, storage_dtype
from espalier_format.codec.tile import TILE
from espalier_format.errors import UsageError
from espalier_format.kernels.operands import (
    check_blocks,
    check_true_size,
    checked_scales,
    checked_trellis,
    padded_size,
)
from espalier_format.kernels.ordered_map import in_order
from espalier_format.kernels.rotation_work import RotationWork
from espalier_format.kernels.windows import unpack_to

_COLUMNS: Final = 1024
_UNPACK_ROWS: Final = 512
_SUMS_ROWS: Final = 128
"""Weights are decoded in blocks of this size: states for the larger one, 1 MiB, then sums for the smaller ones.
They are tuned for cores with about 2 MiB of cache."""

_CODE_TILES: Final = 1024
"""Codes are decoded this many tiles at a time, for the same reason."""

_CODE_ROWS_BYTES: Final = 1 << 20
"""`iter_code_rows` yields blocks of about this size."""


def decode_codes(trellis: NDArray[Any], codebook: Codebook | str, *, threads: int = 1) -> NDArray[Any]:
    """Decode the stored codes of a module, in the rotated basis.

    ``trellis`` is int16 (in_p/16, out_p/16, W), ``codebook`` a codebook or its name; the result has shape
    (in_p, out_p) and the codebook's ``code_dtype``, bit for bit what `reference.decode_codes` gives. Raises
    CodebookError, DtypeError and ShapeError.
    """
    codebook = get_codebook(codebook)
    tiles = checked_trellis(trellis, codebook)
    result = np.empty(padded_size(tiles.shape), codebook.code_dtype)

    def decode(rows: slice) -> None:
        _decode_tile_rows(tiles[rows], codebook.codes, result[rows.start * TILE : rows.stop * TILE])

    for _ in in_order(decode, _tile_row_blocks(tiles.shape, _CODE_ROWS_BYTES), threads):
        pass
    return result


def iter_code_rows(trellis: NDArray[Any], codebook: Codebook | str, *, threads: int = 1) -> Iterator[NDArray[Any]]:
    """Decode a module's codes as consecutive blocks of rows, in the form that decode digests hash.

    Each block is little-endian int16, C-contiguous, of shape (rows, out_p): grid codes as stored (doubled for
    e2m1), EXL3 values as float16 bit patterns. Together they are the (in_p, out_p) matrix of `decode_codes`.
    At most ``threads`` + 2 blocks of about 1 MiB are in memory. Raises CodebookError, DtypeError and ShapeError.
    """
    codebook = get_codebook(codebook)
    tiles = checked_trellis(trellis, codebook)
    codes = codebook.codes
    table = (codes.astype("<i2") if codebook.is_grid else codes.view(np.int16)).astype("<i2", copy=False)

    def decode(rows: slice) -> NDArray[Any]:
        block = np.empty(((rows.stop - rows.start) * TILE, tiles.shape[1] * TILE), "<i2")
        _decode_tile_rows(tiles[rows], table, block)
        return block

    yield from in_order(decode, _tile_row_blocks(tiles.shape, _CODE_ROWS_BYTES), threads)


def decode_weight(
    trellis: NDArray[Any],
    suh: NDArray[Any],
    svh: NDArray[Any],
    codebook: Codebook | str,
    rotation_in: int,
    rotation_out: int,
    in_features: int,
    out_features: int,
    dtype: DtypeName,
    *,
    threads: int = 1,
) -> NDArray[Any]:
    """Decode the weight of a module as a Hugging Face ``.weight``, correctly rounded.

    ``trellis`` is int16 (in_p/16, out_p/16, W), ``suh`` float16 (in_p,), ``svh`` float16 (out_p,), ``codebook`` a
    codebook or its name; the rotation blocks are 0, 32, 64, 128 or 256. The result has shape (out_features,
    in_features): the exact value of spec/rotation.md §3 rounded once to nearest even, an exact zero as +0.0;
    "bfloat16" comes as bit patterns in uint16. The result is the same for any number of threads. Working memory is
    about 4 MiB a thread beyond it.

    Raises CodebookError, DtypeError, ShapeError, NonFiniteScaleError, ScaleOverflowError when a weight is too large
    for float16, and UsageError for an unknown dtype or rotation block.

    >>> trellis = np.zeros((1, 2, 32), np.int16)  # two tiles side by side at 2 bits, all in state 0
    >>> scales = np.ones(16, np.float16), np.ones(32, np.float16)
    >>> decode_weight(trellis, *scales, "e2m1@2", 0, 0, 16, 30, "float32").shape
    (30, 16)
    """
    return decode_rows(
        trellis, suh, svh, codebook, rotation_in, rotation_out, in_features, out_features, dtype,
        slice(0, out_features), threads=threads,
    )  # fmt: skip


def decode_rows(
    trellis: NDArray[Any],
    suh: NDArray[Any],
    svh: NDArray[Any],
    codebook: Codebook | str,
    rotation_in: int,
    rotation_out: int,
    in_features: int,
    out_features: int,
    dtype: DtypeName,
    rows: slice,
    *,
    threads: int = 1,
) -> NDArray[Any]:
    """Decode some rows of a module's Hugging Face ``.weight``: those of `decode_weight`, bit for bit.

    ``rows`` is a slice of output features without step, start < stop. Whole rotation blocks are decoded to
    get them, so slices from `row_blocks` waste nothing. Raises what `decode_weight` raises, and UsageError for
    rows outside the matrix.
    """
    codebook, target = get_codebook(codebook), parse_dtype(dtype)
    tiles = checked_trellis(trellis, codebook)
    padded_in, padded_out = padded_size(tiles.shape)
    check_blocks(padded_in, padded_out, rotation_in, rotation_out)
    check_true_size(padded_in, padded_out, in_features, out_features)
    checked_scales(suh, svh, padded_in, padded_out)
    start, stop = rows.start or 0, out_features if rows.stop is None else rows.stop
    if not 0 <= start < stop <= out_features or rows.step not in (None, 1):
        raise UsageError("no such rows", expected=f"within 0:{out_features}", got=f"{rows.start}:{rows.stop}")

    result = np.empty((stop - start, in_features), storage_dtype(target))
    values = codebook.codes.astype(np.float64)
    # log2 of what stands under the root: both block sizes, and 4 for a value_scale of one half.
    root_exponent = (max(rotation_in, 1) * max(rotation_out, 1)).bit_length() - 1 - 2 * codebook.scale_exponent

    def decode(block: tuple[int, int, int, int]) -> None:
        top, bottom, left, right = block
        tile_block = tiles[left // TILE : right // TILE, top // TILE : bottom // TILE].transpose(1, 0, 2)
        states = np.empty((tile_block.shape[0], TILE, TILE, tile_block.shape[1]), np.uint16)
        unpack_to(tile_block, states.transpose(2, 1, 0, 3))
        work = RotationWork(height // TILE, tile_block.shape[1])
        for upper in range(top, bottom, height):
            part = states[(upper - top) // TILE : (upper - top + height) // TILE]
            sums, spare = work.rotated_sums(values, part, rotation_in, rotation_out)
            first, last, end = max(upper, start), min(upper + height, stop), min(right, in_features)
            sums = sums[first - upper : last - upper, : end - left]
            scale_and_round(
                sums,
                svh[first:last],
                suh[left:end],
                root_exponent,
                target,
                out=result[first - start : last - start, left:end],
                work=spare.reshape(-1)[: sums.size].reshape(sums.shape),
            )

    height = max(rotation_out, _SUMS_ROWS)
    band, length = max(rotation_out, _UNPACK_ROWS), max(rotation_in, _COLUMNS)
    top, bottom = start // height * height, min(padded(stop, height), padded_out)
    blocks = [
        (upper, min(upper + band, bottom), left, min(left + length, padded_in))
        for upper in range(top, bottom, band)
        for left in range(0, padded(in_features, rotation_in), length)
    ]
    for _ in in_order(decode, blocks, threads):
        pass
    return result


def row_blocks(out_features: int, rotation_out: int, padded_in: int, budget_bytes: int) -> Iterator[slice]:
    """Cut a matrix into blocks of rows, to stream it through `decode_rows` in bounded memory.

    Yields slices that together are 0:out_features, in order, each but the last whole rotation blocks and as
    many of them as fit ``budget_bytes`` at 4 bytes a weight, at least one. Raises UsageError for an unknown
    rotation block.
    """
    step = padded(1, rotation_out)
    size = max(budget_bytes // (4 * max(padded_in, 1)) // step, 1) * step
    for start in range(0, out_features, size):
        yield slice(start, min(start + size, out_features))


def _decode_tile_rows(tiles: NDArray[np.uint16], table: NDArray[Any], out: NDArray[Any]) -> None:
    """Decode tiles (k, n, W) to ``out`` (16k, 16n) of the table's dtype, C-contiguous."""
    tile_rows, tile_columns, _ = tiles.shape
    wide = min(tile_columns, _CODE_TILES)
    high = max(_CODE_TILES // max(wide, 1), 1)
    for top in range(0, tile_rows, high):
        bottom = min(top + high, tile_rows)
        states = np.empty((bottom - top, TILE, tile_columns, TILE), np.uint16)
        for left in range(0, tile_columns, wide):
            columns = slice(left, left + wide)
            unpack_to(tiles[top:bottom, columns], states[:, :, columns].transpose(1, 3, 0, 2))
        part = out[top * TILE : bottom * TILE]
        np.take(table, states.reshape(part.shape), out=part, mode="clip")  # "raise" would buffer


def _tile_row_blocks(shape: tuple[int, ...], budget_bytes: int) -> list[slice]:
    rows = max(budget_bytes // (2 * TILE * TILE * max(shape[1], 1)), 1)
    return [slice(start, min(start + rows, shape[0])) for start in range(0, shape[0], rows)]
