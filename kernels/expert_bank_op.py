"""The forward pass of an expert bank as a torch operator: the same call on CPUs and CUDA devices."""

from __future__ import annotations

from typing import Any

from espalier_format.kernels.expert_bank_fallback import expert_bank_fallback
from espalier_format.kernels.expert_bank_tensors import BankTensors, check_bank, check_routing
from espalier_format.kernels.no_derivative import refuse_derivative

# The others first: they say what to install where torch is missing.
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
    refuse_derivative("expert_bank", library)


def _expert_bank_cpu(
    x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, *tensors: Any
) -> torch.Tensor:
    bank = _checked(x, expert_ids, expert_weights, *tensors)
    return expert_bank_fallback(x, expert_ids, expert_weights, bank)


def _expert_bank_cuda(
    x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, *tensors: Any
) -> torch.Tensor:
    bank = _checked(x, expert_ids, expert_weights, *tensors)
    if x.dtype == torch.float32:
        return expert_bank_fallback(x, expert_ids, expert_weights, bank)
    from espalier_format.kernels.cuda.expert_bank import launch_expert_bank  # noqa: PLC0415 - imported where a GPU is

    return launch_expert_bank(x, expert_ids, expert_weights, bank)


def _expert_bank_fake(
    x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, *tensors: Any
) -> torch.Tensor:
    _checked(x, expert_ids, expert_weights, *tensors)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _checked(x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, *tensors: Any) -> BankTensors:
    bank = BankTensors(*tensors)
    check_bank(bank)
    check_routing(x, expert_ids, expert_weights, bank)
    return bank
