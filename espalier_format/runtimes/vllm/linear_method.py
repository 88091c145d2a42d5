"""vLLM's linear layers with quantized weights, merged ones and slices of them included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from vllm.model_executor.layers.linear import LinearMethodBase

from espalier_format.errors import MissingTensorError, UnexpectedTensorError
from espalier_format.kernels import torch_decoder
from espalier_format.kernels.linear import LinearOperand, linear
from espalier_format.runtimes.vllm.folder_check import FolderCheck
from espalier_format.runtimes.vllm.host_options import check_capturable
from espalier_format.runtimes.vllm.layer_parts import LayerShape, layer_parts
from espalier_format.runtimes.vllm.layer_tensors import LayerTensors
from espalier_format.runtimes.vllm.loaded_names import LOADED_NAMES
from espalier_format.schema.config import ModuleSpec


class EspalierLinearMethod(LinearMethodBase):
    """Computes a linear layer from compressed weights: each part on its own, outputs side by side.

    ``modules`` has the layer's modules by their names in the checkpoint, in order, None for a plain one. ``folder``
    checks the checkpoint as a whole, and knows the modules that have a bias there.
    """

    def __init__(self, modules: Mapping[str, ModuleSpec | None], folder: FolderCheck) -> None:
        super().__init__()
        self._modules = dict(modules)
        self._folder = folder

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,  # noqa: ARG002 - vLLM's signature
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,  # noqa: ARG002 - the loader among them cannot slice a trellis
    ) -> None:
        """Add this rank's parameters to the layer.

        Raises UsageError for a split that cuts a rotation block or a tile and for what `check_capturable` refuses,
        ShapeError for other sizes than the model's.
        """
        check_capturable(next(name for name, spec in self._modules.items() if spec is not None), params_dtype)
        shape = LayerShape(
            input_size, input_size_per_partition, tuple(output_partition_sizes), layer.tp_rank, layer.tp_size
        )
        tensors = LayerTensors(layer_parts(self._modules, shape), shape)
        tensors.register(layer, params_dtype)
        layer.espalier = tensors

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that everything was loaded, and make the operands.

        Raises MissingTensorError, UnexpectedTensorError (a bias that the model does not use), NonFiniteScaleError,
        ScaleOverflowError, and what `FolderCheck` finds.
        """
        LOADED_NAMES.warn_unless_compared(layer)
        biases = self._folder.after_loading()
        tensors: LayerTensors = layer.espalier
        tensors.check_loaded(layer)
        bias = getattr(layer, "bias", None)
        if biases is not None:
            _check_biases(list(self._modules), biases, used=bias is not None)
        layer.espalier_operands = tensors.operands(layer)
        layer.espalier_biased = None if bias is None else tensors.biased(layer, bias)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x @ W.T + bias``, (..., outputs of this rank), in the dtype of ``x``."""
        operands = layer.espalier_operands
        if bias is not None and layer.espalier_biased is not None:
            operands, bias = layer.espalier_biased, None
        outputs = [multiply(x, operand) for operand in operands]
        result = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return result if bias is None else result + bias

    def dequantize_weight(self, layer: Any) -> torch.Tensor:
        """Return this rank's weight in full, (outputs, inputs), in the layer's dtype; vLLM asks for MLA, say."""
        return torch.cat([decoded(operand, layer.params_dtype) for operand in layer.espalier_operands])


def multiply(x: torch.Tensor, operand: LinearOperand | torch.Tensor) -> torch.Tensor:
    """Return the product with an operand or a plain weight."""
    return linear(x, operand) if isinstance(operand, LinearOperand) else F.linear(x, operand)


def decoded(operand: LinearOperand | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight of an operand, (out_features, in_features)."""
    if isinstance(operand, torch.Tensor):
        return operand.to(dtype)
    return torch_decoder.decode_weight(
        operand.trellis, operand.suh, operand.svh, operand.codebook, operand.rotation_in, operand.rotation_out,
        operand.in_features, operand.out_features, dtype,
    )  # fmt: skip


def _check_biases(modules: list[str], biases: frozenset[str], *, used: bool) -> None:
    for name in modules:
        if name in biases and not used:
            raise UnexpectedTensorError("the model has no bias here", tensor=f"{name}.bias")
    # Of a merged layer, some parts may have a bias and others get zeros; of none, all would be missing.
    if used and not any(name in biases for name in modules):
        raise MissingTensorError("the model has a bias here", tensor=f"{modules[0]}.bias")
