"""vLLM's output head with a quantized weight. To vLLM it is an embedding, not a linear layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from espalier_format.codec.codebook import get_codebook
from espalier_format.errors import SchemaError
from espalier_format.runtimes.tensor_parallel import FeatureRange, slice_module
from espalier_format.runtimes.vllm.folder_check import FolderCheck
from espalier_format.runtimes.vllm.host_options import check_capturable
from espalier_format.runtimes.vllm.layer_parts import LayerPart, LayerShape, true_sizes
from espalier_format.runtimes.vllm.layer_tensors import LayerTensors
from espalier_format.runtimes.vllm.linear_method import multiply
from espalier_format.schema.config import ModuleSpec


class EspalierHeadMethod(QuantizeMethodBase):
    """Computes logits from compressed weights. vLLM pads the vocabulary; padded logits are zero, and vLLM drops them.

    ``name`` is the head's name in the checkpoint; ``folder`` checks the checkpoint as a whole.
    """

    def __init__(self, name: str, spec: ModuleSpec, folder: FolderCheck) -> None:
        super().__init__()
        self._folder = folder
        self._name = name
        self._spec = spec

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],  # noqa: ARG002 - vLLM's signature; counts vLLM's padding too
        input_size: int,  # noqa: ARG002
        output_size: int,  # noqa: ARG002
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,  # noqa: ARG002
    ) -> None:
        """Add this rank's parameters to the layer.

        Raises UsageError for a split that cuts a rotation block or a tile and for what `check_capturable` refuses,
        ShapeError for other sizes than the model's.
        """
        check_capturable(self._name, params_dtype)
        indices = layer.shard_indices
        rows = FeatureRange(indices.org_vocab_start_index, indices.org_vocab_end_index)
        sizes = true_sizes(self._spec, input_size_per_partition, layer.org_vocab_size)
        parts = []
        if rows.size:  # a rank may have nothing but padding
            rotation = (self._spec.rotation.in_, self._spec.rotation.out)
            held = slice_module(sizes, rotation, outputs=[rows])
            codebook, whole = get_codebook(self._spec.codebook), slice_module(sizes, rotation)
            parts.append(LayerPart(self._name, (0,), (rows.size,), codebook, held, whole))
        shape = LayerShape(
            input_size_per_partition, input_size_per_partition, (rows.size,), layer.tp_rank, layer.tp_size
        )
        layer.espalier = LayerTensors(parts, shape)
        layer.espalier.register(layer, params_dtype)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that everything was loaded, and make the operand.

        Raises MissingTensorError, NonFiniteScaleError, ScaleOverflowError, and what `FolderCheck` finds.
        """
        self._folder.after_loading()
        layer.espalier.check_loaded(layer)
        layer.espalier_operands = layer.espalier.operands(layer)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of this rank's vocabulary, (..., padded vocabulary of the rank), in the dtype of ``x``."""
        width = layer.num_embeddings_per_partition
        if layer.espalier_operands:
            logits = multiply(x, layer.espalier_operands[0])
            logits = F.pad(logits, (0, width - logits.shape[-1]))
        else:
            logits = x.new_zeros((*x.shape[:-1], width))
        return logits if bias is None else logits + bias

    def tie_weights(self, layer: Any, embed_tokens: torch.nn.Module) -> torch.nn.Module:  # noqa: ARG002
        """Refuse: a quantized head has a weight of its own.

        Raises:
            SchemaError: always.
        """
        raise SchemaError(
            "config.json ties the output head to the embeddings, but quantization_config quantizes it: "
            "tie_word_embeddings must be false",
            tensor=self._name,
        )
