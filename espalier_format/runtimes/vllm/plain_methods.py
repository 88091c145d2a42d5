"""Layers that the checkpoint leaves plain: vLLM's own methods, with a check that the weights were loaded.

vLLM checks this for models without quantization only.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from espalier_format.errors import MissingTensorError
from espalier_format.runtimes.vllm.host_options import loads_from_checkpoint


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


def _spoil(layer: Any) -> None:
    layer.espalier_expected = loads_from_checkpoint()
    if layer.espalier_expected:
        layer.weight.data.fill_(math.nan)


def _check(layer: Any, name: str) -> None:
    """Raise MissingTensorError if part of the weight is still as it was made. A sum takes no memory."""
    if layer.espalier_expected and bool(layer.weight.data.sum(dtype=torch.float32).isnan()):
        raise MissingTensorError(
            "vLLM has not found this weight, or not all of it, or it holds NaN", tensor=f"{name}.weight"
        )
