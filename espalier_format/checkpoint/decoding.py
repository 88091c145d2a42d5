"""From stored tensors to weights; what ``Checkpoint.decode`` calls once it needs numpy or torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from espalier_format.codec.casting import FLOAT_DTYPES, cast_floats
from espalier_format.codec.rounding import storage_dtype
from espalier_format.errors import DependencyError, UsageError
from espalier_format.kernels.numpy_decoder import decode_weight

if TYPE_CHECKING:
    from espalier_format.checkpoint.module import QuantizedModule
    from espalier_format.checkpoint.tensors import TensorRef
    from espalier_format.codec.rounding import OutputDtype

_STORED_AS: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def decode_module(module: QuantizedModule, dtype: OutputDtype, device: str | None) -> Any:
    """Decode a quantized module; see ``Checkpoint.decode``."""
    storage_dtype(dtype)
    suh, svh = module.scales()
    trellis = module.trellis.array()
    sizes = (*module.rotation, module.in_features, module.out_features)
    if device is None:
        return decode_weight(trellis, suh, svh, module.codebook, *sizes, dtype)
    torch = _import_torch()
    from espalier_format.kernels import torch_decoder  # noqa: PLC0415 - needs torch

    # Copies, for torch takes no read-only memory.
    trellis_on, suh_on, svh_on = (torch.from_numpy(array.copy()).to(device) for array in (trellis, suh, svh))
    return torch_decoder.decode_weight(trellis_on, suh_on, svh_on, module.codebook, *sizes, dtype)


def decode_plain(tensor: TensorRef, dtype: OutputDtype, device: str | None) -> Any:
    """Cast a plain floating-point tensor; see ``Checkpoint.decode``."""
    storage_dtype(dtype)
    if tensor.dtype not in FLOAT_DTYPES:
        raise UsageError(f"a tensor of dtype {tensor.dtype} cannot be decoded", tensor=tensor.name)
    values = cast_floats(tensor.array(), tensor.dtype, _STORED_AS[dtype], name=tensor.name)
    if device is None:
        return values
    torch = _import_torch()
    result = torch.from_numpy(values.copy())
    return (result.view(torch.bfloat16) if dtype == "bfloat16" else result).to(device)


def _import_torch() -> Any:
    try:
        import torch  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise DependencyError("decoding to a device needs torch: pip install 'espalier-format[torch]'") from error
    return torch
