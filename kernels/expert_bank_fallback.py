"""The forward pass of an expert bank in plain torch: any device, any float dtype, plain experts too."""

from __future__ import annotations

import math
from collections.abc import Mapping

from espalier_format.codec.tile import TILE
from espalier_format.errors import UsageError
from espalier_format.kernels.expert_bank_layout import ALIGNMENT, PROJECTIONS, BankGeometry

# linear first: it says what to install where torch is missing.
from espalier_format.kernels.linear import fallback_matmul  # isort: skip
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation


def expert_bank_fallback(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    trellis: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    codebook_index: torch.Tensor,
    spelling: str,
    plain: Mapping[tuple[str, int], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return what `expert_bank` returns, one routed expert after the other.

    The arguments are those of the op: the tensors of `ExpertBankOperand` and `ExpertBankLayout.spelling`, already
    checked. Products are those of ``torch.nn.functional.linear`` in the dtype of ``x``; the activation and the sum over
    experts are computed in float32, experts in ascending order. Reads the routing on the host.

    Raises UsageError for an expert that the bank does not have and for tables that point out of it, and what
    `fallback_matmul` raises.
    """
    num_experts = offsets.shape[1]
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    routed = sorted(set(expert_ids.flatten().tolist()))
    if routed and not -1 <= routed[0] <= routed[-1] < num_experts:
        wrong = routed[0] if routed[0] < -1 else routed[-1]
        raise UsageError("the bank has no such expert", expected=f"-1 to {num_experts - 1}", got=wrong)
    geometry = BankGeometry.read(spelling)
    starts, books = offsets.tolist(), codebook_index.tolist()

    def project(rows: torch.Tensor, number: int, expert: int) -> torch.Tensor:
        start = starts[number][expert]
        weight = (plain or {}).get((PROJECTIONS[number], expert))
        if weight is not None:
            return F.linear(rows, weight.to(rows.dtype))
        index = books[number][expert]
        if not 0 <= index < len(geometry.codebooks):
            raise UsageError("codebook_index is not that of the bank", expected=len(geometry.codebooks), got=index)
        book = geometry.codebooks[index]
        padded_in, padded_out = geometry.padded_sizes(number)
        shape = (padded_in // TILE, padded_out // TILE, book.halfwords_per_tile)
        if start < 0 or start % ALIGNMENT or start + math.prod(shape) > trellis.numel():
            raise UsageError("offsets are not those of the bank", expected=f"below {trellis.numel()}", got=start)
        suh, svh = geometry.scale_offsets(number, num_experts)
        suh, svh = suh + expert * padded_in, svh + expert * padded_out
        return fallback_matmul(
            rows,
            trellis[start : start + math.prod(shape)].view(shape),
            scales[suh : suh + padded_in],
            scales[svh : svh + padded_out],
            None,
            book.name,
            *geometry.rotation(number),
            *geometry.sizes(number),
        )

    for expert in routed:
        if expert < 0:
            continue
        # A token may name an expert twice: it is computed once, with the sum of the weights.
        named = expert_ids == expert
        tokens = named.any(1).nonzero().squeeze(1)
        weights = (expert_weights[tokens].float() * named[tokens]).sum(1, keepdim=True)
        rows = x[tokens]
        gate, up = project(rows, 0, expert), project(rows, 1, expert)
        inner = (F.silu(gate.float()) * up.float()).to(x.dtype)
        total[tokens] += weights * project(inner, 2, expert).float()
    return total.to(x.dtype)
