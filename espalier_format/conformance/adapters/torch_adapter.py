"""The torch decoder and the linear layer, for tensors on any device."""

from __future__ import annotations

import torch

from espalier_format.checkpoint import open_checkpoint
from espalier_format.codec.codebook import get_codebook
from espalier_format.conformance.adapters.banks import load_bank
from espalier_format.conformance.adapters.reading import open_folder as open  # noqa: A004 - the name of the kind
from espalier_format.conformance.adapters.reading import verify_folder as verify
from espalier_format.kernels import torch_decoder
from espalier_format.kernels.expert_bank import expert_bank
from espalier_format.kernels.linear import LinearOperand, linear
from espalier_format.kernels.torch_dtypes import OUTPUT_DTYPES

__all__ = ["codes", "experts", "load", "matmul", "open", "verify", "weights"]


def codes(trellis: torch.Tensor, codebook: str) -> torch.Tensor:
    """Return the codes, (in_p, out_p)."""
    return torch_decoder.decode_codes(trellis, get_codebook(codebook))


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
    """Return the weight, (out_features, in_features)."""
    book = get_codebook(codebook)
    return torch_decoder.decode_weight(
        trellis, suh, svh, book, rotation_in, rotation_out, in_features, out_features, dtype
    )


def load(folder: str, module: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight of a module of a checkpoint, on the CPU."""
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.decode(module, OUTPUT_DTYPES[dtype], device="cpu")


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
    """Return ``x @ W.T + bias`` by `espalier_format.kernels.linear`."""
    operand = LinearOperand(
        trellis, suh, svh, get_codebook(codebook), rotation_in, rotation_out, in_features, out_features, bias
    )
    return linear(x, operand)


def experts(
    x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, folder: str, bank: str
) -> torch.Tensor:
    """Return the outputs of an expert bank of a checkpoint by `espalier_format.kernels.expert_bank`."""
    return expert_bank(x, expert_ids, expert_weights, load_bank(folder, bank, x.device))
