"""The dtypes that the tensors of a model must have once they are loaded.

transformers before 5.21 leaves a tensor of a quantized checkpoint in its stored dtype if it renames it, e.g. where the
checkpoint has a vision part and the model has none. A layer in float16 in a model in bfloat16 cannot be computed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn

from espalier_format.runtimes.transformers.experts import QuantizedExperts
from espalier_format.runtimes.transformers.linear import QuantizedLinear

_NARROW = (torch.float16, torch.bfloat16)


def wanted_dtypes(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype of every floating-point tensor of ``model``, which is to be loaded in ``dtype``.

    It is the one that the model was made with, but for what its class keeps in float32, and for compressed layers.
    """
    patterns: list[str] = []
    if dtype in _NARROW:
        patterns += getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    if dtype == torch.float16:
        patterns += getattr(model, "_keep_in_fp32_modules", None) or ()
    kept = [re.compile(pattern.replace("*", ".*")) for pattern in patterns]
    compressed = {
        f"{name}.{tensor}"
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear | QuantizedExperts)
        for tensor, _ in module.named_buffers(recurse=False)
    }
    return {
        name: torch.float32
        if name not in compressed and any(expression.search(name) for expression in kept)
        else tensor.dtype
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point()
    }


def cast_tensors(model: nn.Module, wanted: Mapping[str, torch.dtype]) -> None:
    """Cast the tensors that have another dtype; those that are offloaded stay as they are."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        dtype = wanted.get(name, tensor.dtype)
        if tensor.dtype != dtype and tensor.device.type != "meta":
            tensor.data = tensor.data.to(dtype)
