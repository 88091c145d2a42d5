"""Run Espalier checkpoints with transformers 5.17 to 5.24: importing this package is all that it takes.

>>> import torch
>>> from transformers import AutoModelForCausalLM
>>> import espalier_format.runtimes.transformers

A checkpoint to try it with, made from the one that comes with the package:

>>> from importlib.resources import files
>>> from pathlib import Path
>>> from tempfile import mkdtemp
>>> from espalier_format.operations.convert import convert_checkpoint
>>> folder = Path(mkdtemp()) / "llama"
>>> report = convert_checkpoint(str(files("espalier_format") / "demo_data" / "llama-3.0-mcg"), folder, to="espalier")

>>> model = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16")
>>> prompt = torch.tensor([[1, 2, 3]])
>>> made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
>>> made.shape[0]
1
>>> type(model.model.layers[0].mlp.up_proj).__name__
'QuantizedLinear'

``load(folder)`` is ``from_pretrained`` with a check more; use it where config.json may have lost its
``quantization_config``, for then transformers loads random weights and this package is not asked.

What it does:

- Weights stay compressed. Linear layers become `QuantizedLinear`, with the tensors of the checkpoint as buffers, and
  the experts of a layer, each of its own width, one `QuantizedExperts`. Plain tensors are loaded by transformers as
  ever, in the dtype that is asked for: float32, float16 or bfloat16.
- The whole folder is checked before, as `open_checkpoint` checks it, and the account of transformers after. What is
  missing, left over or of another size raises one of `espalier_format.errors`, and there is no model.
- The result is that of the decoded model (``convert --to hf``) in the same dtype, but for rounding: against the exact
  result its error is at most twice as large. In float32 the two agree to about a millionth.
- EXL3 checkpoints, of which transformers would only warn and then run random weights, are refused, unless another
  package, such as exllamav3, has registered that it loads them.
- ``device_map`` and ``.to("cuda")`` move the compressed weights; casting never touches them. Offloading leaves them in
  memory, since they are buffers, unless ``offload_buffers`` is given. Experts are not offloaded.

What it does not: train, save (copy the folder: it is complete, where transformers drops e.g. MTP tensors), decode a
loaded model, tensor parallelism, and experts of other classes than `banks.EXPERT_CLASSES` names.
"""

from __future__ import annotations

from espalier_format.errors import DependencyError

try:
    import torch  # noqa: F401 - transformers can be imported without, but not used here
    from transformers.quantizers.auto import (
        AUTO_QUANTIZATION_CONFIG_MAPPING,
        AUTO_QUANTIZER_MAPPING,
        register_quantization_config,
        register_quantizer,
    )
except ImportError as error:
    raise DependencyError(f"needs transformers 5.17 or newer, and torch: {error}") from error

from espalier_format.runtimes.transformers.config import EspalierConfig
from espalier_format.runtimes.transformers.exl3 import refuse_exl3
from espalier_format.runtimes.transformers.experts import QuantizedExperts
from espalier_format.runtimes.transformers.linear import QuantizedLinear
from espalier_format.runtimes.transformers.loader import load
from espalier_format.runtimes.transformers.quantizer import EspalierQuantizer
from espalier_format.schema.config import QUANT_METHOD

__all__ = ["EspalierConfig", "EspalierQuantizer", "QuantizedExperts", "QuantizedLinear", "load"]


def _register() -> None:
    """Tell transformers about the format; again after a reload of this module, which transformers would refuse."""
    AUTO_QUANTIZATION_CONFIG_MAPPING.pop(QUANT_METHOD, None)
    AUTO_QUANTIZER_MAPPING.pop(QUANT_METHOD, None)
    register_quantization_config(QUANT_METHOD)(EspalierConfig)
    register_quantizer(QUANT_METHOD)(EspalierQuantizer)
    refuse_exl3()


_register()
