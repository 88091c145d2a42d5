"""What a runtime checks once, at load, so that operators need not look at values (spec/rotation.md §5.1).

The operators of `espalier_format.kernels.ops` do not wait for a CUDA device, so there they cannot refuse scales.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from espalier_format.codec.dtype_names import DtypeName
from espalier_format.codec.magnitude import may_overflow_float16
from espalier_format.errors import NonFiniteScaleError, ScaleOverflowError
from espalier_format.kernels.linear import CPU_BLOCK, GPU_BLOCK, LinearOperand, decode_rows
from espalier_format.kernels.numpy_decoder import row_blocks
from espalier_format.kernels.torch_dtypes import torch_dtype

if TYPE_CHECKING:
    from espalier_format.kernels.expert_bank import ExpertBankOperand


def check_scales(operand: LinearOperand, dtype: DtypeName | torch.dtype, name: str | None = None) -> None:
    """Raise unless every scale of a module is finite, padding included, and no weight is too large for ``dtype``.

    ``dtype`` is that of the activations that the module is to be multiplied with, or of the weight that is to be
    decoded. ``name``, of the module, is for errors. Costs two passes over the scales, and only where these could make a
    weight exceed float16, which no real module comes near, the decoding of the module. Waits for the device.

    Raises NonFiniteScaleError and ScaleOverflowError, and UsageError for an unknown dtype.
    """
    wanted = torch_dtype(dtype)
    for kind, scales in (("esp_suh", operand.suh), ("esp_svh", operand.svh)):
        if not bool(torch.isfinite(scales).all()):
            raise NonFiniteScaleError("holds an infinity or a NaN", tensor=kind if name is None else f"{name}.{kind}")
    if wanted == torch.float16:
        _refuse_overflow(operand, name)


def check_bank_scales(bank: ExpertBankOperand, dtype: DtypeName | torch.dtype, name: str | None = None) -> None:
    """Raise as `check_scales` unless every scale of a bank is finite, and no quantized weight too large for ``dtype``.

    ``name`` is that of the bank. Plain experts are not looked at.
    """
    wanted = torch_dtype(dtype)
    if not bool(torch.isfinite(bank.scales).all()):
        raise NonFiniteScaleError("esp_suh or esp_svh of an expert holds an infinity or a NaN", tensor=name)
    if wanted != torch.float16:
        return
    for projection, layout in bank.layout.projections.items():
        for expert in range(bank.layout.num_experts):
            codebook = layout.codebook(expert)
            if codebook is not None:
                tensors = bank.layout.views({"trellis": bank.trellis, "scales": bank.scales}, projection, expert)
                operand = LinearOperand(
                    *tensors, codebook, layout.rotation_in, layout.rotation_out, layout.in_features, layout.out_features
                )
                _refuse_overflow(operand, f"{projection} of expert {expert}" + (f" of {name}" if name else ""))


def _refuse_overflow(operand: LinearOperand, name: str | None) -> None:
    """Raise ScaleOverflowError if a weight of a module with finite scales is too large for float16."""
    true = operand.suh[: operand.in_features], operand.svh[: operand.out_features]
    largest = torch.stack([scales.abs().max() for scales in true]).tolist()
    if not may_overflow_float16(operand.codebook, operand.rotation_in, operand.rotation_out, *largest):
        return
    budget = CPU_BLOCK if operand.trellis.device.type == "cpu" else GPU_BLOCK
    try:
        for rows in row_blocks(operand.out_features, operand.rotation_out, operand.padded_size[0], 4 * budget):
            decode_rows(operand, torch.float16, rows)  # which looks
    except ScaleOverflowError as error:
        raise ScaleOverflowError(error.message, tensor=name) from error
