"""From stored tensors to weights; what ``Checkpoint.decode`` calls once it needs numpy or torch."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from espalier_format.codec.casting import FLOAT_DTYPES, cast_floats
from espalier_format.codec.dtype_names import STORED_AS
from espalier_format.codec.rotation import padded
from espalier_format.codec.rounding import storage_dtype
from espalier_format.codec.tile import TILE
from espalier_format.errors import NonFiniteScaleError, ScaleOverflowError, UnknownSizeError, UsageError
from espalier_format.kernels.numpy_decoder import decode_rows, decode_weight

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from numpy.typing import NDArray

    from espalier_format.checkpoint.module import QuantizedModule
    from espalier_format.checkpoint.packed_module import PackedModule
    from espalier_format.checkpoint.tensors import TensorRef
    from espalier_format.codec.rounding import OutputDtype


def decode_module(module: QuantizedModule, dtype: OutputDtype, device: str | torch.device | None) -> Any:
    """Decode a quantized module; see ``Checkpoint.decode``."""
    storage_dtype(dtype)
    suh, svh = module.scales()
    sizes = (*module.rotation, module.in_features, module.out_features)
    if device is None:
        with _named(module.name, module.trellis):
            return decode_weight(module.trellis.array(), suh, svh, module.codebook, *sizes, dtype)
    from espalier_format.kernels.torch_device import usable_device  # noqa: PLC0415 - needs torch, and says so

    where = usable_device(device)
    import torch  # noqa: PLC0415 - an optional dependency

    from espalier_format.kernels import torch_decoder  # noqa: PLC0415 - needs torch

    # Copies, for torch takes no read-only memory.
    trellis_on, suh_on, svh_on = (
        torch.from_numpy(array.copy()).to(where) for array in (module.trellis.view(), suh, svh)
    )
    with _named(module.name, module.trellis):
        return torch_decoder.decode_weight(trellis_on, suh_on, svh_on, module.codebook, *sizes, dtype)


def decode_packed(module: PackedModule, dtype: OutputDtype, device: str | torch.device | None) -> Any:
    """Decode a compressed-tensors module to its scale's dtype, and cast that; see ``Checkpoint.decode``."""
    storage_dtype(dtype)
    if module.size_source == "padded":
        raise UnknownSizeError("the true size is not known without weight_shape", tensor=module.name)
    values = decode_packed_rows(module, STORED_AS[dtype], slice(0, module.out_features))
    return values if device is None else _on_device(values, dtype, device)


def decode_packed_rows(module: PackedModule, dtype: str, rows: slice, *, threads: int = 1) -> NDArray[Any]:
    """Decode rows of a compressed-tensors module and cast them to ``dtype``, which safetensors spells."""
    values = module.rows(rows.start, rows.stop, threads=threads)
    with _named(module.name, module.scale):
        return cast_floats(values, module.dtype, dtype, name=module.name)


def decode_module_rows(
    module: QuantizedModule, dtype: OutputDtype, rows: slice, *, threads: int = 1
) -> NDArray[np.generic]:
    """Decode rows of a quantized module; whole rotation blocks, as `row_blocks` cuts them, waste nothing.

    The result has shape (rows, in_features) and is what ``Checkpoint.decode`` gives for them; only their part of the
    trellis is read. Raises as ``Checkpoint.decode``.
    """
    suh, svh = module.scales()
    # Rows in whole rotation blocks depend on no other columns of the trellis: only those are read, and copied,
    # because exllamav3 stores them at odd offsets, where a whole trellis could be copied only as a whole.
    block = module.rotation.out or TILE
    start, stop = rows.start // block * block, padded(rows.stop, module.rotation.out)
    with _named(module.name, module.trellis):
        return decode_rows(
            module.trellis.view()[:, start // TILE : stop // TILE].copy(),
            suh,
            svh[start:stop],
            module.codebook,
            *module.rotation,
            module.in_features,
            rows.stop - start,
            dtype,
            slice(rows.start - start, rows.stop - start),
            threads=threads,
        )


def decode_plain(tensor: TensorRef, dtype: OutputDtype, device: str | torch.device | None) -> Any:
    """Cast a plain floating-point tensor; see ``Checkpoint.decode``."""
    storage_dtype(dtype)
    if tensor.dtype not in FLOAT_DTYPES:
        raise UsageError(f"a tensor of dtype {tensor.dtype} cannot be decoded", tensor=tensor.name)
    values = cast_values(tensor, tensor.array(), STORED_AS[dtype])
    return values if device is None else _on_device(values, dtype, device)


def _on_device(values: NDArray[Any], dtype: OutputDtype, device: str | torch.device) -> torch.Tensor:
    from espalier_format.kernels.torch_device import usable_device  # noqa: PLC0415 - needs torch, and says so

    where = usable_device(device)
    import torch  # noqa: PLC0415 - an optional dependency

    result = torch.from_numpy(np.array(values))  # a copy, and an array also where casting made a scalar
    return (result.view(torch.bfloat16) if dtype == "bfloat16" else result).to(where)


def cast_values(tensor: TensorRef, values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Cast some values of a plain tensor to ``dtype``, as `cast_floats` does; errors name the tensor and its file."""
    with _named(tensor.name, tensor):
        return cast_floats(values, tensor.dtype, dtype, name=tensor.name)


@contextmanager
def _named(name: str, stored: TensorRef) -> Iterator[None]:
    """Add module or tensor, and file, to errors of decoders, which know numbers only."""
    try:
        yield
    except (NonFiniteScaleError, ScaleOverflowError) as error:
        raise type(error)(
            error.message, path=stored.shard.path, tensor=name, expected=error.expected, got=error.got
        ) from error
