"""The torch operators of the package: on a CUDA device its own kernels."""

from __future__ import annotations

import torch

from espalier_format.conformance.adapters.banks import load_bank
from espalier_format.errors import NonFiniteScaleError, ScaleOverflowError
from espalier_format.kernels import ops  # noqa: F401 - registers the operators
from espalier_format.kernels.expert_bank import expert_bank

__all__ = ["codes", "experts", "matmul", "weights"]


def codes(trellis: torch.Tensor, codebook: str) -> torch.Tensor:
    """Return the codes, (in_p, out_p)."""
    result: torch.Tensor = torch.ops.espalier_format.decode_codes(trellis, codebook)
    return result


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
    """Return the weight, (out_features, in_features).

    The operator does not look at values, as that would wait for the device: whoever loads a module checks its scales,
    and whoever wants float16 looks for infinities. Here it is this function.
    """
    for name, scales in (("suh", suh), ("svh", svh)):
        if not bool(torch.isfinite(scales).all()):
            raise NonFiniteScaleError(f"{name} holds an infinity or a NaN")
    weight: torch.Tensor = torch.ops.espalier_format.decode_weight(
        trellis, suh, svh, codebook, rotation_in, rotation_out, in_features, out_features, dtype
    )
    if bool(torch.isinf(weight).any()):
        raise ScaleOverflowError(f"a weight is too large for {dtype}")
    return weight


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
