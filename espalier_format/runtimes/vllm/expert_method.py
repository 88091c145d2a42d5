"""vLLM's routed experts from a bank in which every expert and projection has a width of its own."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from espalier_format.errors import ShapeError, UsageError
from espalier_format.kernels.expert_bank import expert_bank
from espalier_format.runtimes.tensor_parallel import equal_share
from espalier_format.runtimes.vllm.bank_tensors import BankTensors, has_plain, rank_projections
from espalier_format.runtimes.vllm.folder_check import FolderCheck
from espalier_format.runtimes.vllm.host_options import check_capturable
from espalier_format.schema.expert_bank import ExpertBank


class EspalierExpertMethod(FusedMoEMethodBase):
    """Computes routed experts from compressed weights: w2(silu(w1(x)) * w3(x)), as banks hold them.

    ``moe`` is vLLM's FusedMoEConfig, ``name`` the bank's name in the checkpoint; ``folder`` checks the checkpoint as a
    whole.
    """

    def __init__(self, moe: Any, name: str, bank: ExpertBank, folder: FolderCheck) -> None:
        super().__init__(moe)
        self._folder = folder
        self._name = name
        self._bank = bank

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *_: Any, **__: Any
    ) -> tuple[int, int]:
        """Return the sizes as they are: no kernel of vLLM's is used, and so no padding for one."""
        return hidden_size, intermediate_size_per_partition

    def create_weights(
        self,
        layer: Any,
        num_experts: int,  # noqa: ARG002 - vLLM's signature
        hidden_size: int,
        intermediate_size_per_partition: int,  # noqa: ARG002
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,  # noqa: ARG002
    ) -> None:
        """Add this rank's bank to the layer.

        Raises:
            UsageError: a split that cuts a rotation block or a tile, experts of a kind that is not supported, or what
                `check_capturable` refuses.
            ShapeError: another size or number of experts than the model's.
        """
        self._check_kind(layer)
        some_plain = has_plain(self._bank)
        check_capturable(self._name, params_dtype, some_plain=some_plain)
        if self.moe.num_experts != self._bank.num_experts:
            raise ShapeError(
                "the model has another number of experts than the bank", tensor=self._name,
                expected=self.moe.num_experts, got=self._bank.num_experts,
            )  # fmt: skip
        experts = _experts_of_rank(layer, self._bank.num_experts)
        intermediate = self.moe.intermediate_size
        share = equal_share(intermediate, self.moe.tp_rank, self.moe.tp_size)
        try:
            projections = rank_projections(self._bank, hidden_size, intermediate, share, experts)
        except (UsageError, ShapeError) as error:
            raise type(error)(error.message, tensor=self._name, expected=error.expected, got=error.got) from None
        layer.espalier = BankTensors(self._name, projections, experts, params_dtype)
        layer.espalier.register(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that everything was loaded, and make the operand.

        Raises MissingTensorError, NonFiniteScaleError, ScaleOverflowError, and what `FolderCheck` finds.
        """
        self._folder.after_loading()
        layer.espalier_bank = layer.espalier.operand()

    def get_fused_moe_quant_config(self, layer: Any) -> None:  # noqa: ARG002
        """Return nothing: vLLM's own kernels are not used."""
        return

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,  # noqa: ARG002 - vLLM computes shared experts itself
        shared_experts_input: torch.Tensor | None = None,  # noqa: ARG002
    ) -> torch.Tensor:
        """Return the weighted sum over those experts of each token that this rank holds, (tokens, hidden)."""
        if topk_ids.dtype not in (torch.int32, torch.int64):
            topk_ids = topk_ids.to(torch.int64)
        if layer.expert_map is not None:
            topk_ids = rank_ids(topk_ids, layer.expert_map)
        return expert_bank(x, topk_ids, topk_weights, layer.espalier_bank)

    def _check_kind(self, layer: Any) -> None:
        clamped = getattr(layer, "swiglu_limit", None) is not None
        reasons = {
            f"an activation other than silu ({layer.activation})": layer.activation != MoEActivation.SILU or clamped,
            "biases": bool(self.moe.has_bias),
            "router weights on the input": bool(layer.apply_router_weight_on_input),
            "data parallelism with expert parallelism": bool(self.moe.moe_parallel_config.use_all2all_kernels),
            "LoRA": bool(self.moe.is_lora_enabled),
        }
        for reason, applies in reasons.items():
            if applies:
                raise UsageError(f"experts with {reason} are not supported in vLLM", tensor=self._name)


def rank_ids(ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return this rank's numbers of experts: -1 for an expert of another rank, and for -1, which is no expert."""
    # As an index, -1 would be the last expert.
    return torch.where(ids < 0, -1, places[ids.clamp_min(0).long()])


def _experts_of_rank(layer: Any, num_experts: int) -> tuple[int, ...]:
    """Return the experts that this rank holds, in its own order: all of them without expert parallelism."""
    if layer.expert_map is None:
        return tuple(range(num_experts))
    places = layer.expert_map.tolist()
    held = [expert for expert in range(num_experts) if places[expert] >= 0]
    return tuple(sorted(held, key=lambda expert: int(places[expert])))
