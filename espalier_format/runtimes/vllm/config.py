"""vLLM's quantization config for Espalier checkpoints: which method computes which layer."""

from __future__ import annotations

from typing import Any, Self

import torch
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig as HostConfig

from espalier_format.errors import UsageError
from espalier_format.runtimes.vllm.folder_check import FolderCheck
from espalier_format.runtimes.vllm.host_options import download_folder, loads_from_checkpoint, tracks_weights
from espalier_format.runtimes.vllm.layer_names import LayerNames, NameMapper, constituents
from espalier_format.runtimes.vllm.loaded_names import LOADED_NAMES
from espalier_format.schema.config import QUANT_METHOD, ModuleSpec, QuantizationConfig, parse_quantization_config


@register_quantization_config(QUANT_METHOD)
class EspalierConfig(HostConfig):
    """The block ``quantization_config`` of a checkpoint, and the names that vLLM's model gives its modules."""

    def __init__(self, quantization: QuantizationConfig) -> None:
        super().__init__()
        self.quantization = quantization
        self._names = LayerNames(quantization.modules, quantization.expert_banks)
        self._folder = FolderCheck(quantization)

    @classmethod
    def get_name(cls) -> str:
        """Return "espalier"."""
        return QUANT_METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Return the dtypes that activations may have."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the lowest compute capability of a CUDA device, times ten."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no names: the config stands in config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Read the block of config.json. Raises what `parse_quantization_config` raises."""
        return cls(parse_quantization_config(config))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: NameMapper) -> None:
        """Rename the modules as the model does."""
        self._names.rename(hf_to_vllm_mapper)

    def maybe_update_config(self, model_name: str, *_: Any, revision: str | None = None, **__: Any) -> None:
        """Check a local folder before vLLM reads it: `check_folder` says what, and what it raises.

        vLLM calls this once, before it starts its workers. A model that is named by its place on the Hub is not here
        yet: it is checked when a worker has loaded it.
        """
        self._folder.before_loading(model_name, revision)

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Return what computes a layer, None where vLLM's default is right. ``prefix`` is its name in the model.

        Raises UsageError for quantized embeddings, for single quantized experts that are in no bank, and for a load
        format that goes past the checks.
        """
        loads = loads_from_checkpoint()
        self._folder.will_load(download_folder(), loads=loads)
        if loads and tracks_weights():
            LOADED_NAMES.expect(layer)
        # Late: these modules load most of vLLM's, and every process of vLLM imports this one.
        from vllm.model_executor.layers.fused_moe import RoutedExperts  # noqa: PLC0415
        from vllm.model_executor.layers.linear import LinearBase  # noqa: PLC0415
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding  # noqa: PLC0415

        if isinstance(layer, LinearBase):
            return self._linear_method(prefix)
        if isinstance(layer, VocabParallelEmbedding):
            return self._vocabulary_method(layer, prefix)
        if isinstance(layer, RoutedExperts):
            return self._expert_method(layer, prefix)
        return None

    def _linear_method(self, prefix: str) -> Any:
        modules: dict[str, ModuleSpec | None] = {}
        whole = self._names.module(prefix)
        for name in (prefix,) if whole is not None else constituents(prefix, self.packed_modules_mapping):
            original = self._names.module(name)
            modules[original or name] = None if original is None else self.quantization.modules[original]
        if not any(modules.values()):
            from espalier_format.runtimes.vllm.plain_methods import PlainLinearMethod  # noqa: PLC0415 - as above

            return PlainLinearMethod(prefix)
        from espalier_format.runtimes.vllm.linear_method import EspalierLinearMethod  # noqa: PLC0415 - as above

        return EspalierLinearMethod(modules, self._folder)

    def _vocabulary_method(self, layer: Any, prefix: str) -> Any:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead  # noqa: PLC0415 - as above

        name = self._names.module(prefix)
        if name is None:
            from espalier_format.runtimes.vllm.plain_methods import PlainEmbeddingMethod  # noqa: PLC0415 - as above

            return PlainEmbeddingMethod(prefix)
        if not isinstance(layer, ParallelLMHead):
            raise UsageError("quantized embeddings are not supported in vLLM", tensor=name)
        from espalier_format.runtimes.vllm.head_method import EspalierHeadMethod  # noqa: PLC0415 - as above

        return EspalierHeadMethod(name, self.quantization.modules[name], self._folder)

    def _expert_method(self, layer: Any, prefix: str) -> Any:
        name = self._names.bank(prefix)
        if name is None:
            single = self._names.within(prefix)
            if single is not None:
                raise UsageError("a quantized expert that is in no expert bank is not supported in vLLM", tensor=single)
            from espalier_format.runtimes.vllm.plain_methods import PlainExpertMethod  # noqa: PLC0415 - as above

            return PlainExpertMethod(layer.moe_config, prefix.removesuffix(".routed_experts"))
        from espalier_format.runtimes.vllm.expert_method import EspalierExpertMethod  # noqa: PLC0415 - as above

        return EspalierExpertMethod(layer.moe_config, name, self.quantization.expert_banks[name], self._folder)
