"""What operations check before anything is launched, beyond what `espalier_format.kernels.linear` checks of a module.

Only shapes, dtypes, devices and addresses: values lie on the device, and looking at them would wait for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from espalier_format.codec.codebook import Codebook
from espalier_format.errors import DtypeError, ShapeError, UsageError
from espalier_format.kernels.linear import LinearOperand
from espalier_format.kernels.operands import check_trellis_shape

ALIGNMENT: Final = 16
"""Kernels read the trellis in pieces of this many bytes, from addresses that are multiples of it."""


def check_contiguous_trellis(trellis: torch.Tensor, codebook: Codebook) -> None:
    """Raise DtypeError unless a trellis is int16, ShapeError unless it is contiguous and can be of that codebook."""
    if trellis.dtype != torch.int16:
        raise DtypeError("a trellis must be of 16-bit words", expected="int16", got=trellis.dtype)
    check_trellis_shape(tuple(trellis.shape), codebook)
    if not trellis.is_contiguous():
        raise ShapeError("the trellis must be contiguous", got=f"strides {tuple(trellis.stride())}")


def check_rows(start: int, stop: int | None, out_features: int) -> int:
    """Return the end of the output features [start, stop), ``stop`` None being the last.

    Raises UsageError unless 0 <= start <= stop <= out_features.
    """
    last = out_features if stop is None else stop
    if not 0 <= start <= last <= out_features:
        raise UsageError("no such rows", expected=f"0 <= start <= stop <= {out_features}", got=f"{start}:{last}")
    return last


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor at an address that kernels can read: itself, or a copy of a view at an odd place."""
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def aligned_operand(operand: LinearOperand) -> LinearOperand:
    """Return a module whose trellis and scales kernels can read, itself or one with copies; a bias may lie anywhere."""
    tensors = (operand.trellis, operand.suh, operand.svh)
    copies = tuple(map(aligned, tensors))
    if all(copy is tensor for copy, tensor in zip(copies, tensors, strict=True)):
        return operand
    return replace(operand, trellis=copies[0], suh=copies[1], svh=copies[2])


def check_aligned(name: str, tensor: torch.Tensor) -> None:
    """Raise UsageError unless kernels can read a tensor where it lies: for one that is too large to be copied."""
    if tensor.data_ptr() % ALIGNMENT:
        raise UsageError(
            f"{name} must begin at a multiple of {ALIGNMENT} bytes", expected=0, got=tensor.data_ptr() % ALIGNMENT
        )
