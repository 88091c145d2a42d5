"""The experts of one layer, each with widths of its own, in place of a model's own experts module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Self

import torch
from torch import nn

from espalier_format.kernels.expert_bank import ExpertBankOperand, expert_bank
from espalier_format.kernels.expert_bank_layout import PROJECTIONS, ExpertBankLayout
from espalier_format.runtimes.transformers.linear import apply_but_cast, is_brought

BUFFERS: Final = ("trellis", "scales")


@dataclass(frozen=True, slots=True)
class BankPlan:
    """What a bank consists of: sizes and, in the order of `PROJECTIONS`, each expert's codebook and (in, out) blocks.

    A codebook is None where the expert is stored plain.
    """

    hidden: int
    intermediate: int
    codebooks: tuple[tuple[str | None, ...], ...]
    rotations: tuple[tuple[int, int], ...]

    def layout(self) -> ExpertBankLayout:
        """Return where everything lies."""
        return _layout(self)


@lru_cache(maxsize=256)
def _layout(plan: BankPlan) -> ExpertBankLayout:
    return ExpertBankLayout.of(
        plan.hidden,
        plan.intermediate,
        dict(zip(PROJECTIONS, plan.codebooks, strict=True)),
        dict(zip(PROJECTIONS, plan.rotations, strict=True)),
    )


class QuantizedExperts(nn.Module):
    """All experts of a layer, computed by `expert_bank`; its buffers are those of an `ExpertBankOperand`.

    Made on the "meta" device. transformers puts the buffers where they belong; `fill` gives them their values.
    ``forward`` takes what a mixture-of-experts block of transformers gives its experts: hidden states (tokens, hidden),
    the numbers of the experts (tokens, k) and their weights (tokens, k). Casting casts plain experts only.
    """

    def __init__(self, plan: BankPlan, dtype: torch.dtype) -> None:
        super().__init__()
        self.plan = plan
        self.dtype = dtype
        layout = plan.layout()
        self.num_experts = layout.num_experts
        self.hidden_dim = plan.hidden
        self.intermediate_dim = plan.intermediate
        # Not persistent until they are filled: the checkpoint has them under other names, one for each expert.
        for name, tensor in layout.empty_buffers("meta").items():
            self.register_buffer(name, tensor, persistent=False)
        for projection, sizes in layout.projections.items():
            for expert in sizes.plain_experts():
                shape = (sizes.out_features, sizes.in_features)
                weight = torch.empty(shape, dtype=dtype, device="meta")
                self.register_buffer(plain_name(projection, expert), weight, persistent=False)
        self._operand: ExpertBankOperand | None = None

    def fill(self, operand: ExpertBankOperand) -> None:
        """Take the tensors of ``operand``, moved to where the buffers are; plain weights are cast to their dtype."""
        for name, tensor in operand.tensors().items():
            place = getattr(self, name)
            delattr(self, name)
            self.register_buffer(name, tensor.to(place.device, place.dtype))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts, (tokens, hidden), of the dtype of ``hidden_states``."""
        return expert_bank(hidden_states, top_k_index, top_k_weights, self.operand())

    def operand(self) -> ExpertBankOperand:
        """Return the bank as its buffers are now; the object is kept while they are, if they are to stay."""
        kept = self._operand
        if kept is None or any(tensor is not self._buffers[name] for name, tensor in kept.tensors().items()):
            tensors = {name: tensor for name, tensor in self._buffers.items() if tensor is not None}
            layout = self.plan.layout()
            plain = {
                (projection, expert): tensors[plain_name(projection, expert)]
                for projection, sizes in layout.projections.items()
                for expert in sizes.plain_experts()
            }
            kept = ExpertBankOperand(layout, **{name: tensors[name] for name in BUFFERS}, plain=plain)
            self._operand = None if is_brought(self) else kept
        return kept

    def extra_repr(self) -> str:
        """Return what stands in the printed model."""
        sizes = f"num_experts={self.num_experts}, hidden={self.hidden_dim}, intermediate={self.intermediate_dim}"
        return f"{sizes}, codebooks={', '.join(self.plan.layout().codebook_names)}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self._operand = None  # it would hold the memory that this gives back
        result: Self = apply_but_cast(self, ("scales",), fn, super()._apply, recurse=recurse)
        return result

    def __getstate__(self) -> dict[str, Any]:
        # The operand refers to the buffers; a copy of the module makes its own.
        return {**self.__dict__, "_operand": None}


def plain_name(projection: str, expert: int) -> str:
    """Return the buffer name of a plain expert, as `ExpertBankOperand.tensors` has it."""
    return f"plain_{projection}_{expert}"
