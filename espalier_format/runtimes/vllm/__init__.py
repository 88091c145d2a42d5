"""Run Espalier checkpoints in vLLM: plain ``vllm serve FOLDER`` or ``LLM(FOLDER)``, with this package installed.

vLLM finds `register` by the entry point group ``vllm.general_plugins`` and calls it in each of its processes.

| module | content |
|---|---|
| `config` | the quantization config of vLLM: which method computes which layer |
| `linear_method`, `head_method`, `expert_method` | linear layers, the output head, routed experts |
| `plain_methods` | layers that the checkpoint leaves plain, with a check that they were loaded |
| `loaded_names` | a comparison of the whole model with what was loaded |
| `layer_parts`, `layer_tensors` | which modules of the checkpoint make up a layer, on this rank; their tensors |
| `bank_tensors` | the same for an expert bank |
| `layer_names` | names in vLLM's model |
| `completeness`, `folder_check` | what is checked of the files as a whole, and when |
| `host_options` | what vLLM was asked to do: load formats, CUDA graphs |

`layer_parts`, `layer_names`, `completeness` and `folder_check` need neither vLLM nor torch.
"""

from __future__ import annotations

import logging


def register() -> None:
    """Make the quantization method "espalier" known to vLLM. Does nothing else, and may be called again.

    A vLLM that this plugin does not fit still runs other models: then the method is not registered, a warning says why,
    and vLLM refuses Espalier checkpoints by itself.
    """
    try:
        import espalier_format.runtimes.vllm.config  # noqa: F401, PLC0415 - its class registers itself
    except ImportError as error:
        logging.getLogger(__name__).warning("Espalier checkpoints cannot be loaded: %s", error)
