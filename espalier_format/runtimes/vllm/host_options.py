"""What the user asked of vLLM, as far as it decides which checks apply and what can be served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform

from espalier_format.errors import UsageError

_DUMMY: Final = "dummy"
_LOADING_FORMATS: Final = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "runai_streamer"}
)
"""Formats in which vLLM reads safetensors and hands each tensor to the loader of a parameter.

The others either read other files (pt, npcache) or write into parameters past their loaders (tensorizer, sharded_state,
runai_streamer_sharded, ipc_cache); of formats that another plugin adds nothing is known.
"""


def loads_from_checkpoint() -> bool:
    """Tell whether vLLM is about to load the checkpoint; False for dummy weights only, of which nothing is checked.

    Raises UsageError for a load format that may go past this plugin's loaders, and so past its checks.
    """
    config = get_current_vllm_config_or_none()
    if config is None:
        return True  # nothing says that the checks may be left out
    load_format = str(config.load_config.load_format)
    if load_format == _DUMMY:
        return False
    if load_format not in _LOADING_FORMATS:
        raise UsageError(
            f"Espalier checkpoints cannot be loaded with --load-format {load_format}", expected=sorted(_LOADING_FORMATS)
        )
    return True


def tracks_weights() -> bool:
    """Tell whether to compare what the model has loaded with its parameters: unless the user has turned that off.

    vLLM has an option for its own such comparison: --model-loader-extra-config '{"enable_weights_track": false}'.
    """
    config = get_current_vllm_config_or_none()
    extra = None if config is None else config.load_config.model_loader_extra_config
    return not isinstance(extra, Mapping) or extra.get("enable_weights_track") is not False


def download_folder() -> str | None:
    """Return the folder that vLLM downloads weights to, None for the cache of huggingface_hub."""
    config = get_current_vllm_config_or_none()
    folder = None if config is None else config.load_config.download_dir
    return None if folder is None else str(folder)


def check_capturable(name: str, dtype: torch.dtype, *, some_plain: bool = False) -> None:
    """Raise UsageError for a layer that CUDA graphs cannot capture where vLLM is going to capture some.

    ``dtype`` is that of activations; ``some_plain`` says that the layer is a bank with plain experts. Both decide
    whether a kernel computes the layer or torch, step by step and reading back to the host. On other platforms, and
    with --enforce-eager, everything runs.
    """
    reason = "plain experts in a bank" if some_plain else "float32 activations" if dtype == torch.float32 else None
    config = get_current_vllm_config_or_none()
    if reason is None or config is None or not current_platform.is_cuda() or config.model_config.enforce_eager:
        return
    raise UsageError(f"CUDA graphs cannot capture {reason}: start vLLM with --enforce-eager", tensor=name)
