"""Tensors as safetensors stores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from espalier_format.container.header import serialise_header

_NUMPY: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I16": "<i2", "I8": "i1", "I64": "<i8"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor: dtype as safetensors names it, shape, little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, dtype: str, array: NDArray[Any]) -> StoredTensor:
        """Store an array of that dtype; BF16 is given as float32, in which it must be exact."""
        if dtype == "BF16":
            array = array.astype(np.float32).view(np.uint32) >> np.uint32(16)
        return cls(dtype, array.shape, np.ascontiguousarray(array, dtype=_NUMPY[dtype]).tobytes())


def safetensors_bytes(tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a whole file; the tensors lie in the given order, and its data begins at a multiple of 8 bytes."""
    header = serialise_header([(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()], metadata)
    return b"".join([header, *(tensor.data for tensor in tensors.values())])
