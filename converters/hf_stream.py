"""The bytes of a Hugging Face tensor, decoded, cast and joined block by block in bounded memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from espalier_format.checkpoint.decoding import cast_values, decode_module_rows, decode_packed_rows
from espalier_format.codec.casting import FLOAT_DTYPES
from espalier_format.container.shard import CHUNK_BYTES
from espalier_format.errors import SourceError
from espalier_format.kernels.numpy_decoder import row_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.codec.rounding import OutputDtype
    from espalier_format.converters.hf_tensors import HfTensor, Row, Stored

BLOCK_BYTES: Final = 16 * 1024 * 1024
"""Memory for one block of rows at 4 bytes a weight; about three times that is alive at once."""

_FOLLOWING_DTYPES: Final = frozenset({"BF16", "F16"})
"""Dtypes of plain tensors that follow the target dtype; F32 and F64 are there because somebody needed the precision."""

_DECODER_DTYPES: Final[dict[str, OutputDtype]] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_WIDENING: Final = ("F32", "F64")


def written_dtype(checkpoint: Checkpoint, tensor: HfTensor, target: str | None) -> str:
    """Return the safetensors dtype that ``tensor`` is written in; ``target`` is "BF16", "F16" or "F32".

    Without ``target``, which only packed modules may do, each weight has the dtype that it is decoded to.

    Decoded weights and plain F16 and BF16 tensors follow ``target``; every other plain tensor keeps its dtype. A
    joined tensor takes the widest of its parts. Raises SourceError for parts that have no common dtype, or none of
    16 bits or more.
    """
    dtypes = {_part_dtype(checkpoint, source, target) for source in tensor.sources()}
    joined = tensor.transposed or len(list(tensor.sources())) > 1
    if joined and not dtypes <= FLOAT_DTYPES.keys():
        raise SourceError(f"its parts cannot be joined: they are {', '.join(sorted(dtypes))}", tensor=tensor.name)
    if len(dtypes) == 1:
        return dtypes.pop()
    wider = [dtype for dtype in _WIDENING if dtype in dtypes]
    mixed_double = "F64" in dtypes and any(source.quantized for source in tensor.sources())
    if not wider or not dtypes <= FLOAT_DTYPES.keys() or mixed_double:
        raise SourceError(f"its parts cannot be joined: they are {', '.join(sorted(dtypes))}", tensor=tensor.name)
    return wider[-1]


def stream_tensor(checkpoint: Checkpoint, tensor: HfTensor, dtype: str, *, threads: int = 1) -> Iterator[memoryview]:
    """Yield the little-endian bytes of ``tensor`` in ``dtype``, which `written_dtype` gave.

    Weights are rounded once from the exact value. Memory: a few `BLOCK_BYTES`, or one page of a transposed tensor.

    Raises:
        NonFiniteScaleError: a scale is infinite or NaN.
        ScaleOverflowError: a value is too large for ``dtype``.
        TruncatedError: a source file has changed its size.
    """
    for page in tensor.pages:
        if tensor.transposed:
            rows = [block for row in page for block in _row_blocks(checkpoint, row, dtype, threads)]
            yield _bytes(np.concatenate(rows).T)
            continue
        for row in page:
            if len(row) == 1 and not row[0].quantized:
                yield from _plain_bytes(checkpoint, row[0], dtype)
            else:
                yield from map(_bytes, _row_blocks(checkpoint, row, dtype, threads))


def _part_dtype(checkpoint: Checkpoint, source: Stored, target: str | None) -> str:
    if source.quantized:
        return checkpoint.packed[source.name].dtype if target is None else target
    stored = checkpoint.tensors[source.name].dtype
    return target if target is not None and stored in _FOLLOWING_DTYPES else stored


def _plain_bytes(checkpoint: Checkpoint, source: Stored, dtype: str) -> Iterator[memoryview]:
    """Yield a plain tensor of any shape; only the first ``shape[0]`` rows of it, which matters for padded biases."""
    stored = checkpoint.tensors[source.name]
    if source.shape == stored.shape and stored.dtype == dtype:
        for chunk in stored.shard.chunks(stored.info.start, stored.info.end):
            yield memoryview(chunk)
        return
    item = FLOAT_DTYPES[stored.dtype]
    end = math.prod(source.shape) * item.itemsize
    for start in range(0, end, CHUNK_BYTES):
        values = np.frombuffer(bytes(stored.data()[start : min(start + CHUNK_BYTES, end)]), item)
        yield _bytes(cast_values(stored, values, dtype))


def _row_blocks(checkpoint: Checkpoint, row: Row, dtype: str, threads: int) -> Iterator[npt.NDArray[np.generic]]:
    """Yield blocks of rows of 2-D matrices that stand side by side."""
    modules = (checkpoint.modules.get(source.name) for source in row if source.quantized)
    block = max((module.rotation.out for module in modules if module is not None), default=0)
    width = sum(source.shape[1] for source in row)
    for rows in row_blocks(row[0].shape[0], block, width, BLOCK_BYTES):
        parts = [_matrix_rows(checkpoint, source, dtype, rows, threads) for source in row]
        yield parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _matrix_rows(
    checkpoint: Checkpoint, source: Stored, dtype: str, rows: slice, threads: int
) -> npt.NDArray[np.generic]:
    if not source.quantized:
        stored = checkpoint.tensors[source.name]
        item = FLOAT_DTYPES[stored.dtype]
        row_bytes = source.shape[1] * item.itemsize
        data = bytes(stored.data()[rows.start * row_bytes : rows.stop * row_bytes])
        values = np.frombuffer(data, item).reshape(-1, source.shape[1])
        return cast_values(stored, values, dtype)
    if source.name in checkpoint.packed:
        return decode_packed_rows(checkpoint.packed[source.name], dtype, rows, threads=threads)
    return decode_module_rows(checkpoint.modules[source.name], _DECODER_DTYPES[dtype], rows, threads=threads)


def _bytes(values: npt.NDArray[np.generic]) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
