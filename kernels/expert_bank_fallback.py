"""The forward pass of an expert bank in plain torch: any device, any float dtype, plain experts too."""

from __future__ import annotations

import math
from collections.abc import Mapping

from espalier_format.codec.tile import TILE
from espalier_format.errors import UsageError
from espalier_format.kernels.expert_bank_layout import ALIGNMENT, PROJECTIONS
from espalier_format.kernels.expert_bank_tensors import BankTensors
from espalier_format.kernels.linear import LinearOperand, fallback_matmul, plain_linear

# The others first: they say what to install where torch is missing.
import torch  # isort: skip
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation


def expert_bank_fallback(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    bank: BankTensors,
    plain: Mapping[tuple[str, int], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return what `expert_bank` returns, one routed expert after the other.

    The arguments have been checked; ``plain`` is that of `ExpertBankOperand`. Products are those of
    ``torch.nn.functional.linear`` in the dtype of ``x``; the activation and the sum over experts are computed in
    float32, experts in ascending order. Reads the routing on the host.

    Raises UsageError for an expert that the bank does not have and for tables that point out of it, and what
    `fallback_matmul` raises.
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    routed = sorted(set(expert_ids.flatten().tolist()))
    if routed and not -1 <= routed[0] <= routed[-1] < bank.num_experts:
        wrong = routed[0] if routed[0] < -1 else routed[-1]
        raise UsageError("the bank has no such expert", expected=f"-1 to {bank.num_experts - 1}", got=wrong)
    starts, books = bank.offsets.tolist(), bank.codebook_index.tolist()

    def project(rows: torch.Tensor, number: int, expert: int) -> torch.Tensor:
        weight = (plain or {}).get((PROJECTIONS[number], expert))
        if weight is not None:
            return plain_linear(rows, weight.to(rows.dtype))
        return fallback_matmul(rows, _expert(bank, number, expert, starts[number][expert], books[number][expert]))

    for expert in routed:
        if expert < 0:
            continue
        # A token may name an expert twice: it is computed once, with the sum of the weights. The weights of its other
        # experts, and of "no expert", are not looked at: they may be anything, a NaN too.
        named = expert_ids == expert
        tokens = named.any(1).nonzero().squeeze(1)
        weights = expert_weights[tokens].float().masked_fill(~named[tokens], 0).sum(1, keepdim=True)
        rows = x[tokens]
        gate, up = project(rows, 0, expert), project(rows, 1, expert)
        inner = (F.silu(gate.float()) * up.float()).to(x.dtype)
        total[tokens] += weights * project(inner, 2, expert).float()
    return total.to(x.dtype)


def _expert(bank: BankTensors, number: int, expert: int, start: int, book: int) -> LinearOperand:
    """Return one projection of an expert, whose trellis begins with halfword ``start``, as views of the bank."""
    geometry, halfwords = bank.geometry, bank.trellis.numel()
    if not 0 <= book < len(geometry.codebooks):
        raise UsageError("codebook_index is not that of the bank", expected=len(geometry.codebooks), got=book)
    codebook = geometry.codebooks[book]
    padded_in, padded_out = geometry.padded_sizes(number)
    shape = (padded_in // TILE, padded_out // TILE, codebook.halfwords_per_tile)
    if start < 0 or start % ALIGNMENT or start + math.prod(shape) > halfwords:
        raise UsageError("offsets are not those of the bank", expected=f"below {halfwords}", got=start)
    suh, svh = geometry.scale_offsets(number, bank.num_experts)
    suh, svh = suh + expert * padded_in, svh + expert * padded_out
    return LinearOperand(
        bank.trellis[start : start + math.prod(shape)].view(shape),
        bank.scales[suh : suh + padded_in],
        bank.scales[svh : svh + padded_out],
        codebook,
        *geometry.rotation(number),
        *geometry.sizes(number),
    )
