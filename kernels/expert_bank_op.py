"""The forward pass of an expert bank as a torch operator: the same call on CPUs and CUDA devices."""

from __future__ import annotations

from typing import Any

from espalier_format.errors import DtypeError, ShapeError, UsageError
from espalier_format.kernels.expert_bank_fallback import expert_bank_fallback
from espalier_format.kernels.expert_bank_layout import ALIGNMENT, BankGeometry
from espalier_format.kernels.linear import FLOATS

# linear first: it says what to install where torch is missing.
import torch  # isort: skip


def register(library: Any) -> None:
    """Define ``expert_bank`` in a library and implement it for CPU, CUDA and Meta."""
    library.define(
        "expert_bank(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor trellis, Tensor scales, "
        "Tensor offsets, Tensor codebook_index, str spelling) -> Tensor"
    )
    library.impl("expert_bank", _expert_bank_cpu, "CPU")
    library.impl("expert_bank", _expert_bank_cuda, "CUDA")
    torch.library.register_fake("espalier_format::expert_bank", _expert_bank_fake, lib=library)


def check_arguments(x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, hidden: int) -> None:
    """Raise unless these can be routed through a bank: DtypeError, ShapeError, or UsageError for several devices."""
    if x.dtype not in FLOATS:
        raise DtypeError("x must be a float tensor", expected="float16, bfloat16 or float32", got=x.dtype)
    if expert_ids.dtype not in (torch.int64, torch.int32):
        raise DtypeError("expert_ids must be whole numbers", expected="int64 or int32", got=expert_ids.dtype)
    if expert_weights.dtype not in FLOATS:
        raise DtypeError("expert_weights must be a float tensor", got=expert_weights.dtype)
    if x.dim() != 2 or x.shape[1] != hidden:
        raise ShapeError("x does not fit the bank", expected=f"(tokens, {hidden})", got=tuple(x.shape))
    if expert_ids.dim() != 2 or expert_ids.shape[0] != x.shape[0]:
        raise ShapeError("expert_ids does not fit x", expected=f"({x.shape[0]}, k)", got=tuple(expert_ids.shape))
    if expert_weights.shape != expert_ids.shape:
        raise ShapeError(
            "expert_weights does not fit expert_ids",
            expected=tuple(expert_ids.shape),
            got=tuple(expert_weights.shape),
        )
    for name, tensor in (("expert_ids", expert_ids), ("expert_weights", expert_weights)):
        if tensor.device != x.device:
            raise UsageError(f"{name} must be on the device of x", expected=x.device, got=tensor.device)


def _check(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    trellis: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    codebook_index: torch.Tensor,
    spelling: str,
) -> None:
    """Raise unless the tensors can be a bank of that spelling, as far as shapes tell.

    Values are not read, as that would wait for the device: that ``offsets`` and ``codebook_index`` are those of a
    layout is up to `ExpertBankOperand`, which makes them.
    """
    geometry = BankGeometry.read(spelling)
    check_arguments(x, expert_ids, expert_weights, geometry.hidden)
    num_experts = offsets.shape[-1] if offsets.dim() else 0
    _, svh = geometry.scale_offsets(2, num_experts)
    for name, tensor, dtype, shape in (
        ("offsets", offsets, torch.int64, (3, num_experts)),
        ("codebook_index", codebook_index, torch.int32, (3, num_experts)),
        ("scales", scales, torch.float16, (svh + num_experts * geometry.padded_sizes(2)[1],)),
        ("trellis", trellis, torch.int16, (trellis.numel(),)),
    ):
        if tensor.dtype != dtype:
            raise DtypeError(f"{name} has another dtype", expected=dtype, got=tensor.dtype)
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ShapeError(
                f"{name} does not fit the bank, or is not contiguous", expected=shape, got=tuple(tensor.shape)
            )
        if tensor.device != x.device:
            raise UsageError(f"{name} must be on the device of x", expected=x.device, got=tensor.device)
    if num_experts < 1 or not geometry.codebooks:
        raise UsageError("the bank has no quantized expert", got=(num_experts, spelling))
    least, largest = geometry.trellis_bounds(num_experts)
    if trellis.numel() % ALIGNMENT or not least <= trellis.numel() <= largest:
        raise ShapeError(
            "the trellis does not fit the bank", expected=f"{least} to {largest}, in steps of {ALIGNMENT}",
            got=trellis.numel(),
        )  # fmt: skip


def _expert_bank_cpu(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    trellis: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    codebook_index: torch.Tensor,
    spelling: str,
) -> torch.Tensor:
    _check(x, expert_ids, expert_weights, trellis, scales, offsets, codebook_index, spelling)
    return expert_bank_fallback(x, expert_ids, expert_weights, trellis, scales, offsets, codebook_index, spelling)


def _expert_bank_cuda(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    trellis: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    codebook_index: torch.Tensor,
    spelling: str,
) -> torch.Tensor:
    if x.dtype == torch.float32:
        return _expert_bank_cpu(x, expert_ids, expert_weights, trellis, scales, offsets, codebook_index, spelling)
    _check(x, expert_ids, expert_weights, trellis, scales, offsets, codebook_index, spelling)
    from espalier_format.kernels.cuda.expert_bank import launch_expert_bank  # noqa: PLC0415 - imported where a GPU is

    return launch_expert_bank(x, expert_ids, expert_weights, trellis, scales, offsets, codebook_index, spelling)


def _expert_bank_fake(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    trellis: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    codebook_index: torch.Tensor,
    spelling: str,
) -> torch.Tensor:
    _check(x, expert_ids, expert_weights, trellis, scales, offsets, codebook_index, spelling)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
