"""The numpy decoder, for arrays: correctly rounded weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier_format.checkpoint import Checkpoint, open_checkpoint
from espalier_format.codec.codebook import get_codebook
from espalier_format.codec.rounding import OutputDtype
from espalier_format.conformance.adapters.reading import open_folder as open  # noqa: A004 - the name of the kind
from espalier_format.conformance.adapters.reading import verify_folder as verify
from espalier_format.kernels import numpy_decoder

__all__ = ["codes", "experts", "load", "matmul", "open", "verify", "weights"]


def codes(trellis: NDArray[np.int16], codebook: str) -> NDArray[Any]:
    """Return the codes, (in_p, out_p)."""
    return numpy_decoder.decode_codes(trellis, get_codebook(codebook))


def weights(
    trellis: NDArray[np.int16],
    suh: NDArray[np.float16],
    svh: NDArray[np.float16],
    codebook: str,
    rotation_in: int,
    rotation_out: int,
    in_features: int,
    out_features: int,
    dtype: OutputDtype,
) -> NDArray[Any]:
    """Return the weight, (out_features, in_features); bfloat16 as uint16 patterns."""
    book = get_codebook(codebook)
    return numpy_decoder.decode_weight(
        trellis, suh, svh, book, rotation_in, rotation_out, in_features, out_features, dtype
    )


def load(folder: str, module: str, dtype: OutputDtype) -> NDArray[Any]:
    """Return the weight of a module of a checkpoint."""
    with open_checkpoint(folder) as checkpoint:
        weight: NDArray[Any] = checkpoint.decode(module, dtype)
        return weight


def matmul(
    x: NDArray[Any],
    trellis: NDArray[np.int16],
    suh: NDArray[np.float16],
    svh: NDArray[np.float16],
    bias: NDArray[Any] | None,
    codebook: str,
    rotation_in: int,
    rotation_out: int,
    in_features: int,
    out_features: int,
) -> NDArray[Any]:
    """Return ``x @ W.T + bias`` in the dtype of x: a product of decoded float32 weights, in float32."""
    weight = weights(
        trellis, suh, svh, codebook, rotation_in, rotation_out, in_features, out_features, "float32"
    )  # fmt: skip
    product = _single(x) @ weight.T
    if bias is not None:
        product += _single(bias)
    return product.astype(x.dtype) if x.dtype != np.uint16 else _bfloat16(product)


def _single(array: NDArray[Any]) -> NDArray[np.float32]:
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32)


def _bfloat16(array: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round finite numbers to the nearest bfloat16, ties to even."""
    bits = array.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def experts(
    x: NDArray[Any], expert_ids: NDArray[np.int64], expert_weights: NDArray[np.float32], folder: str, bank: str
) -> NDArray[Any]:
    """Return the outputs of an expert bank of a checkpoint: products in float32, of decoded float32 weights."""
    rows = _single(x)
    total = np.zeros(rows.shape, np.float32)
    with open_checkpoint(folder) as checkpoint:
        for expert in np.unique(expert_ids).tolist():
            tokens, places = np.nonzero(expert_ids == expert)
            gate, up, down = (
                checkpoint.decode(_tensor_of(checkpoint, f"{bank}.{expert}.{name}_proj"), "float32")
                for name in ("gate", "up", "down")
            )
            gated = rows[tokens] @ gate.T
            # silu, in a form that does not overflow.
            inner = gated * (1 + np.tanh(gated / 2)) / 2 * (rows[tokens] @ up.T)
            total[tokens] += expert_weights[tokens, places][:, None] * (inner @ down.T)
    return total.astype(x.dtype) if x.dtype != np.uint16 else _bfloat16(total)


def _tensor_of(checkpoint: Checkpoint, module: str) -> str:
    return module if module in checkpoint.modules else f"{module}.weight"
