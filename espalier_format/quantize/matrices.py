"""Where the weight of a linear module lies in the source, and how blocks of it are read in bounded memory.

All matrices are read in Hugging Face orientation: rows are output features. A part of a fused tensor is a matrix
like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from espalier_format.checkpoint.decoding import decode_module_rows
from espalier_format.codec.casting import FLOAT_DTYPES, cast_floats
from espalier_format.container.header import tensor_bytes
from espalier_format.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from espalier_format.checkpoint.module import QuantizedModule
    from espalier_format.checkpoint.packed_module import PackedModule
    from espalier_format.checkpoint.tensors import TensorRef

BLOCK_BYTES: Final = 8 * 1024 * 1024


class Matrix(Protocol):
    """A matrix of the source; nothing is read before ``rows``. It is what `encode_module` takes as a weight."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        ...

    @property
    def dtype(self) -> str:
        """Dtype that its values are stored in, as safetensors spells it; F32 for one that has to be decoded."""
        ...

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return rows [start, stop) as float32, every value finite.

        Raises:
            SourceError: a value is infinite or NaN, or the dtype is none that can be quantized.
            TruncatedError: the source file has changed its size.
            NonFiniteScaleError, ScaleOverflowError: of a module that is quantized already.
        """
        ...

    def stored_rows(self, start: int, stop: int) -> bytes:
        """Return rows [start, stop) as they are stored, in ``dtype``."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StoredMatrix:
    """Consecutive rows of a stored tensor, whose last dimension is ``in_features``, the others being flattened."""

    tensor: TensorRef
    shape: tuple[int, int]
    first_row: int = 0

    @property
    def dtype(self) -> str:
        """See `Matrix`."""
        return self.tensor.dtype

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """See `Matrix`."""
        _check_dtype(self.tensor)
        values = np.frombuffer(self.stored_rows(start, stop), FLOAT_DTYPES[self.dtype])
        return _float32(values.reshape(-1, self.shape[1]), self.tensor)

    def stored_rows(self, start: int, stop: int) -> bytes:
        """See `Matrix`."""
        width = tensor_bytes(self.dtype, (self.shape[1],))
        begin = self.tensor.info.start + (self.first_row + start) * width
        return b"".join(self.tensor.shard.chunks(begin, begin + (stop - start) * width))


@dataclass(frozen=True, slots=True, eq=False)
class TransposedMatrix:
    """Consecutive columns of one page of a stored 3-D tensor (pages, in_features, columns)."""

    tensor: TensorRef
    shape: tuple[int, int]
    page: int
    first_column: int = 0

    @property
    def dtype(self) -> str:
        """See `Matrix`."""
        return self.tensor.dtype

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """See `Matrix`."""
        _check_dtype(self.tensor)
        return _float32(self._columns(start, stop), self.tensor)

    def stored_rows(self, start: int, stop: int) -> bytes:
        """See `Matrix`."""
        return self._columns(start, stop).tobytes()

    def _columns(self, start: int, stop: int) -> NDArray[Any]:
        # A view, since a tensor at an odd offset could be copied only as a whole; the copy of a part is aligned.
        page = self.tensor.view()[self.page]
        return np.array(page[:, self.first_column + start : self.first_column + stop].T, order="C")


@dataclass(frozen=True, slots=True, eq=False)
class DecodedMatrix:
    """The weight of a module that is quantized already, decoded and rounded to float32 once."""

    module: QuantizedModule

    @property
    def shape(self) -> tuple[int, int]:
        """See `Matrix`."""
        return self.module.out_features, self.module.in_features

    @property
    def dtype(self) -> str:
        """See `Matrix`."""
        return "F32"

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """See `Matrix`."""
        return decode_module_rows(self.module, "float32", slice(start, stop)).astype(np.float32, copy=False)

    def stored_rows(self, start: int, stop: int) -> bytes:
        """See `Matrix`."""
        return self.rows(start, stop).tobytes()


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """The weight of a compressed-tensors module, in the dtype of its scale, as compressed-tensors decodes it."""

    module: PackedModule

    @property
    def shape(self) -> tuple[int, int]:
        """See `Matrix`."""
        return self.module.out_features, self.module.in_features

    @property
    def dtype(self) -> str:
        """See `Matrix`."""
        return self.module.dtype

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """See `Matrix`; also raises ShapeError where the module's tensors contradict each other."""
        return _float32(self.module.rows(start, stop), self.module.weight, self.dtype)

    def stored_rows(self, start: int, stop: int) -> bytes:
        """See `Matrix`."""
        return self.module.rows(start, stop).tobytes()


def row_slices(matrix: Matrix) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of consecutive blocks of rows of at most `BLOCK_BYTES` as float32, or of one row."""
    outputs, inputs = matrix.shape
    step = max(1, BLOCK_BYTES // (4 * max(1, inputs)))
    for start in range(0, outputs, step):
        yield start, min(start + step, outputs)


def _check_dtype(tensor: TensorRef) -> None:
    if tensor.dtype not in FLOAT_DTYPES:
        raise SourceError(
            f"a weight of dtype {tensor.dtype} cannot be quantized; BF16, F16 and F32 can",
            path=tensor.shard.path,
            tensor=tensor.name,
        )


def _float32(values: NDArray[Any], tensor: TensorRef, dtype: str | None = None) -> NDArray[np.float32]:
    stored = tensor.dtype if dtype is None else dtype
    single: NDArray[np.float32] = cast_floats(values, stored, "F32", name=tensor.name).astype(np.float32)
    if not np.isfinite(single).all():
        bad = single[~np.isfinite(single)].flat[0]
        raise SourceError(
            f"the weight holds {'NaN' if np.isnan(bad) else 'an infinity'}, and cannot be quantized",
            path=tensor.shard.path,
            tensor=tensor.name,
        )
    return single
