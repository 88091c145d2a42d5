"""The torch operators of the package: on a CUDA device its own kernels.

There they look at no values, as that would wait for the device: what a module's scales must be is checked when the
module is loaded, here by `load`, as the package's runtimes do, with `espalier_format.kernels.load_checks`. So `weights`
is declared `refuses_at_load`, and adds nothing to the operator. On a CPU the operator refuses itself.
"""

from __future__ import annotations

import torch

from espalier_format.checkpoint import open_checkpoint
from espalier_format.conformance.adapters.banks import load_bank
from espalier_format.conformance.at_load import refuses_at_load
from espalier_format.kernels import ops  # noqa: F401 - registers the operators
from espalier_format.kernels.expert_bank import expert_bank
from espalier_format.kernels.linear import LinearOperand
from espalier_format.kernels.load_checks import check_scales

__all__ = ["codes", "experts", "load", "matmul", "weights"]


def codes(trellis: torch.Tensor, codebook: str) -> torch.Tensor:
    """Return the codes, (in_p, out_p)."""
    result: torch.Tensor = torch.ops.espalier_format.decode_codes(trellis, codebook)
    return result


@refuses_at_load
def weights(
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
    rotation_in: int,
    rotation_out: int,
    in_features: int,
    out_features: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the weight, (out_features, in_features): the operator, and nothing else."""
    weight: torch.Tensor = torch.ops.espalier_format.decode_weight(
        trellis, suh, svh, codebook, rotation_in, rotation_out, in_features, out_features, dtype
    )
    return weight


def load(folder: str, module: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight of a module of a checkpoint, on a CUDA device if there is one: checked, and then decoded."""
    with open_checkpoint(folder) as checkpoint:
        operand = LinearOperand.from_module(checkpoint.modules[module])
    check_scales(operand, dtype, module)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return weights(
        operand.trellis.to(device), operand.suh.to(device), operand.svh.to(device), operand.codebook.name,
        operand.rotation_in, operand.rotation_out, operand.in_features, operand.out_features, dtype,
    )  # fmt: skip


def matmul(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    codebook: str,
    rotation_in: int,
    rotation_out: int,
    in_features: int,
    out_features: int,
) -> torch.Tensor:
    """Return ``x @ W.T + bias``."""
    result: torch.Tensor = torch.ops.espalier_format.matmul(
        x, trellis, suh, svh, bias, codebook, rotation_in, rotation_out, in_features, out_features
    )
    return result


def experts(
    x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, folder: str, bank: str
) -> torch.Tensor:
    """Return the outputs of an expert bank of a checkpoint: those of the operator, for banks without plain experts.

    The operator takes no plain experts; with them, `espalier_format.kernels.expert_bank.expert_bank` computes all.
    """
    operand = load_bank(folder, bank, x.device)
    if operand.plain:
        return expert_bank(x, expert_ids, expert_weights, operand)
    result: torch.Tensor = torch.ops.espalier_format.expert_bank(
        x, expert_ids, expert_weights, operand.trellis, operand.scales, operand.offsets, operand.codebook_index,
        operand.layout.spelling,
    )  # fmt: skip
    return result
