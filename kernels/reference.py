"""The reference decoder: plain numpy, one step of the specification at a time.

Written to be read, and to be what the other decoders are compared with. It takes a whole module at once,
so it needs about 40 bytes of memory a weight; `espalier_format.kernels.numpy_decoder` is the one to use.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.codebook import Codebook, get_codebook
from espalier_format.codec.rotation import hadamard
from espalier_format.codec.tile import RING, TILE
from espalier_format.codec.trellis import TILE_POSITION, unpack_states
from espalier_format.kernels.operands import check_blocks, checked_scales, checked_trellis, padded_size


def decode_codes(trellis: NDArray[Any], codebook: Codebook | str) -> NDArray[Any]:
    """Decode the stored codes of a module, in the rotated basis (spec/packing.md).

    ``trellis`` is int16 (in_p/16, out_p/16, W), ``codebook`` a codebook or its name; the result has shape
    (in_p, out_p) and the codebook's ``code_dtype``. Exact. Raises CodebookError, DtypeError and ShapeError.

    >>> codes = decode_codes(np.zeros((1, 2, 48), np.int16), "int5@3")
    >>> codes.shape, codes.dtype.name, bool((codes == get_codebook("int5@3").codes[0]).all())
    ((16, 32), 'int8', True)
    """
    codebook = get_codebook(codebook)
    # 1. Bits to states, states to codes, in ring order.
    ring = codebook.codes[unpack_states(checked_trellis(trellis, codebook))]
    # 2. Ring order to row-major order inside each tile.
    tiles = np.empty_like(ring)
    tiles[..., TILE_POSITION] = ring
    # 3. Tiles side by side.
    tile_rows, tile_columns, _ = tiles.shape
    grid = tiles.reshape(tile_rows, tile_columns, TILE, RING // TILE)
    return grid.transpose(0, 2, 1, 3).reshape(tile_rows * TILE, tile_columns * TILE)


def decode_weight(
    trellis: NDArray[Any],
    suh: NDArray[Any],
    svh: NDArray[Any],
    codebook: Codebook | str,
    rotation_in: int,
    rotation_out: int,
) -> NDArray[np.float64]:
    """Decode the weight of a module, transposed and padded as it is stored (spec/rotation.md §3).

    ``W^T = diag(suh) H_in V H_out diag(svh)``. ``trellis`` is int16 (in_p/16, out_p/16, W), ``suh`` float16
    (in_p,), ``svh`` float16 (out_p,); the rotation blocks are 0, 32, 64, 128 or 256. The result is float64
    (in_p, out_p): the exact value with a relative error below 2^-50, since the signed sums of a rotation are
    exact in float64. Raises CodebookError, DtypeError, ShapeError, NonFiniteScaleError, and UsageError for another
    block.
    """
    codebook = get_codebook(codebook)
    padded_in, padded_out = padded_size(checked_trellis(trellis, codebook).shape)
    check_blocks(padded_in, padded_out, rotation_in, rotation_out)
    checked_scales(suh, svh, padded_in, padded_out)

    values = decode_codes(trellis, codebook).astype(np.float64) * codebook.value_scale
    rotated = _rotate_rows(_rotate_rows(values, rotation_in).T, rotation_out).T
    norm = np.sqrt(float(max(rotation_in, 1) * max(rotation_out, 1)))
    scales = suh.astype(np.float64)[:, None] * svh.astype(np.float64)[None, :]
    weight: NDArray[np.float64] = rotated * scales / norm
    return weight


def _rotate_rows(matrix: NDArray[np.float64], block: int) -> NDArray[np.float64]:
    """Multiply each group of ``block`` rows with the Hadamard matrix of entries +1 and -1."""
    signs = hadamard(block).astype(np.float64)
    groups = matrix.reshape(-1, signs.shape[0], matrix.shape[1])
    return (signs @ groups).reshape(matrix.shape)
