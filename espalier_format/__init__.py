"""The open format for trellis-quantized LLM checkpoints: open, check, decode, convert and quantize them.

Start with ``open_checkpoint``. Names are imported when they are first used, so ``import espalier_format``
costs almost nothing.

PYTEST_DONT_REWRITE: pytest loads the plugin in here, and would warn where the package was imported before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from espalier_format import errors
    from espalier_format.checkpoint import Checkpoint, ExpertBankView, QuantizedModule, open_checkpoint
    from espalier_format.codec.codebook import CODEBOOKS, Codebook, get_codebook
    from espalier_format.errors import EspalierError
    from espalier_format.kernels.digest import decode_digest
    from espalier_format.kernels.numpy_decoder import decode_codes, decode_weight
    from espalier_format.operations.convert import convert_checkpoint
    from espalier_format.operations.inspect import inspect_checkpoint
    from espalier_format.operations.quantize import quantize_checkpoint
    from espalier_format.operations.verify import verify_checkpoint
    from espalier_format.planning import Plan, plan
    from espalier_format.schema import Manifest, QuantizationConfig, parse_manifest, parse_quantization_config

    __version__: str

__all__ = [
    "CODEBOOKS",
    "Checkpoint",
    "Codebook",
    "EspalierError",
    "ExpertBankView",
    "Manifest",
    "Plan",
    "QuantizationConfig",
    "QuantizedModule",
    "__version__",
    "convert_checkpoint",
    "decode_codes",
    "decode_digest",
    "decode_weight",
    "errors",
    "get_codebook",
    "inspect_checkpoint",
    "open_checkpoint",
    "parse_manifest",
    "parse_quantization_config",
    "plan",
    "quantize_checkpoint",
    "verify_checkpoint",
]

_HOMES: Final = {
    "CODEBOOKS": "espalier_format.codec.codebook",
    "Checkpoint": "espalier_format.checkpoint",
    "Codebook": "espalier_format.codec.codebook",
    "EspalierError": "espalier_format.errors",
    "ExpertBankView": "espalier_format.checkpoint",
    "Manifest": "espalier_format.schema",
    "Plan": "espalier_format.planning",
    "QuantizationConfig": "espalier_format.schema",
    "QuantizedModule": "espalier_format.checkpoint",
    "convert_checkpoint": "espalier_format.operations.convert",
    "decode_codes": "espalier_format.kernels.numpy_decoder",
    "decode_digest": "espalier_format.kernels.digest",
    "decode_weight": "espalier_format.kernels.numpy_decoder",
    "get_codebook": "espalier_format.codec.codebook",
    "inspect_checkpoint": "espalier_format.operations.inspect",
    "open_checkpoint": "espalier_format.checkpoint",
    "parse_manifest": "espalier_format.schema",
    "parse_quantization_config": "espalier_format.schema",
    "plan": "espalier_format.planning",
    "quantize_checkpoint": "espalier_format.operations.quantize",
    "verify_checkpoint": "espalier_format.operations.verify",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use (PEP 562)."""
    value: Any
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - costs more than the rest of the import

        value = version("espalier-format")
    elif name == "errors":
        value = import_module("espalier_format.errors")
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
