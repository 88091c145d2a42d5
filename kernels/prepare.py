"""Compile kernels before they are needed, several at once."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import torch

from espalier_format.codec.dtype_names import DtypeName
from espalier_format.errors import UsageError
from espalier_format.kernels.cuda import decode as cuda_decode
from espalier_format.kernels.cuda import matmul as cuda_matmul
from espalier_format.kernels.cuda.loading import Preparation
from espalier_format.kernels.linear import LinearOperand
from espalier_format.kernels.matmul import fused_rows
from espalier_format.kernels.torch_device import usable_device
from espalier_format.kernels.torch_dtypes import torch_dtype

if TYPE_CHECKING:
    from espalier_format.kernels.expert_bank import ExpertBankOperand

_ANY: Final = 1 << 31
"""More rows than a tensor has."""


def prepare(
    operands: Iterable[LinearOperand | ExpertBankOperand],
    dtype: DtypeName | torch.dtype,
    *,
    rows: int | None = None,
    device: torch.device | str | None = None,
) -> int:
    """Compile and load all kernels that products with some operands will launch, and return how many forms there are.

    Activations have ``dtype``, torch's or its name, and up to ``rows`` rows (tokens), None for any number; with more
    rows than `fused_rows` the kernel that decodes the weight to ``dtype`` is among them, so that `decode_weight` finds
    it too. Nothing is computed with the operands. They may lie on another device, "meta" too, if ``device`` names the
    one that they are for. Where that is no CUDA device, and for float32 and banks with a plain expert, which run in
    plain torch, there is nothing to do. Kernels that are not on disk are compiled as many at a time as there are
    processors. Safe to call while other threads compute products.

    Raises UsageError for rows below 1, an unknown dtype, a device that is not there, is too old or has too little
    shared memory, and a weight that is too large; DependencyError without cuda-core.
    """
    if rows is not None and (type(rows) is not int or rows < 1):
        raise UsageError("rows must be a whole number, at least 1", got=repr(rows))
    if device is not None:
        device = usable_device(device)
    wanted = torch_dtype(dtype)
    alike = {_form(operand): operand for operand in operands}  # layers of a model: few forms, and planning takes time
    needed = dict.fromkeys(
        each for operand in alike.values() for each in _needed(operand, wanted, _ANY if rows is None else rows, device)
    )
    if not needed:
        return 0
    with ThreadPoolExecutor(min(len(needed), os.cpu_count() or 1)) as pool:
        for done in [pool.submit(each.call, *each.arguments) for each in needed]:
            done.result()
    return len(needed)


def _form(operand: LinearOperand | ExpertBankOperand) -> tuple[Hashable, ...]:
    """Return all of an operand that what it needs depends on."""
    if isinstance(operand, LinearOperand):
        sizes = operand.rotation_in, operand.rotation_out, operand.in_features, operand.out_features
        return operand.codebook, *sizes, operand.trellis.device
    return operand.bank.spelling, len(operand.plain) > 0, operand.trellis.device


def _needed(
    operand: LinearOperand | ExpertBankOperand, dtype: torch.dtype, rows: int, device: torch.device | str | None
) -> list[Preparation]:
    where = operand.trellis.device if device is None else torch.device(device)
    if where.type != "cuda" or dtype not in cuda_decode.DTYPES:
        return []
    index = torch.cuda.current_device() if where == torch.device("cuda") else where.index
    if not isinstance(operand, LinearOperand):
        from espalier_format.kernels.cuda import expert_bank  # noqa: PLC0415 - imported where a bank is

        return [] if len(operand.plain) else [expert_bank.preparation(operand.bank, dtype, index)]
    padded_in, padded_out = operand.padded_size
    fused = fused_rows(padded_in * padded_out)
    found = sorted(cuda_matmul.preparations(operand, min(rows, fused), index), key=repr)
    if rows > fused:
        found.append(cuda_decode.preparation(operand, dtype, index))
    return found
