"""Layers that the checkpoint leaves plain: vLLM's own methods, with a check that the weights were loaded.

vLLM checks this for models without quantization only, and not whether all parts of a weight were.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from espalier_format.errors import MissingTensorError
from espalier_format.runtimes.vllm.host_options import loads_from_checkpoint
from espalier_format.runtimes.vllm.loaded_names import LOADED_NAMES


@register_weight_loader_v2_supported_method
class PlainLinearMethod(UnquantizedLinearMethod):
    """A plain linear layer; ``name`` is its name in vLLM's model."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def create_weights(self, layer: Any, *sizes: Any, **options: Any) -> None:
        """Add vLLM's parameter, and fill it with NaN."""
        super().create_weights(layer, *sizes, **options)
        _spoil(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check the weight, then do what vLLM does. Raises MissingTensorError."""
        _check(layer, self._name)
        super().process_weights_after_loading(layer)


class PlainEmbeddingMethod(UnquantizedEmbeddingMethod):
    """Plain embeddings, or a plain output head; ``name`` is its name in vLLM's model, which vLLM may not say."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name or "the embedding"

    def create_weights(self, layer: Any, *sizes: Any, **options: Any) -> None:
        """Add vLLM's parameter, and fill it with NaN."""
        super().create_weights(layer, *sizes, **options)
        _spoil(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check the weight, then do what vLLM does. Raises MissingTensorError."""
        _check(layer, self._name)
        super().process_weights_after_loading(layer)


class PlainExpertMethod(UnquantizedFusedMoEMethod):
    """Routed experts without a quantized projection; ``name`` is the bank's name in vLLM's model."""

    def __init__(self, moe: Any, name: str) -> None:
        super().__init__(moe)
        self._name = name

    def create_weights(self, layer: Any, *sizes: Any, **options: Any) -> None:
        """Add vLLM's parameters, and make the first number of each projection of each expert NaN."""
        super().create_weights(layer, *sizes, **options)
        # One number each, and the first: vLLM may round the sizes up, and what it rounds up by is never loaded.
        layer.espalier_spoiled = frozenset(("w13_weight", "w2_weight") if loads_from_checkpoint() else ())
        if layer.espalier_spoiled:
            for numbers in self._first_numbers(layer).values():
                numbers.fill_(math.nan)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check every expert that this rank has, then do what vLLM does. Raises MissingTensorError."""
        LOADED_NAMES.warn_unless_compared(layer)
        if layer.espalier_spoiled:
            for projection, numbers in self._first_numbers(layer).items():
                for place in numbers.isnan().nonzero().flatten().tolist():
                    raise MissingTensorError(
                        "vLLM has not found this weight, or it holds NaN",
                        tensor=f"{self._name}.{_expert(layer, place)}.{projection}.weight",
                    )
            layer.espalier_spoiled = frozenset()
        super().process_weights_after_loading(layer)

    def _first_numbers(self, layer: Any) -> dict[str, torch.Tensor]:
        """Return views of (experts of the rank,), by the names of projections in the checkpoint."""
        first: torch.Tensor = layer.w13_weight.data
        found = {layer.ckpt_gate_proj_name: first[:, 0, 0], layer.ckpt_down_proj_name: layer.w2_weight.data[:, 0, 0]}
        if self.moe.is_act_and_mul:
            found[layer.ckpt_up_proj_name] = first[:, first.shape[1] // 2, 0]
        return found


def _expert(layer: Any, place: int) -> int:
    """Return the number, in the checkpoint, of an expert of this rank."""
    if layer.expert_map is None:
        return place
    return int((layer.expert_map == place).nonzero()[0])


def _spoil(layer: Any) -> None:
    layer.espalier_spoiled = frozenset(("weight",) if loads_from_checkpoint() else ())
    if layer.espalier_spoiled:
        layer.weight.data.fill_(math.nan)


def _check(layer: Any, name: str) -> None:
    """Raise MissingTensorError if part of the weight is still as it was made. A sum takes no memory."""
    LOADED_NAMES.warn_unless_compared(layer)
    if layer.espalier_spoiled and bool(layer.weight.data.sum(dtype=torch.float32).isnan()):
        raise MissingTensorError(
            "vLLM has not found this weight, or not all of it, or it holds NaN", tensor=f"{name}.weight"
        )
