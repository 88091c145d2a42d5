"""What transformers is told about EXL3 checkpoints: that they are to be converted.

Of a method that it does not know transformers only warns, and then runs with random weights. So "exl3" is registered,
to be refused, unless somebody who can load it has done so before. One who comes later may put a class of his own in the
place of this one (``AUTO_QUANTIZATION_CONFIG_MAPPING["exl3"] = …``, as exllamav3 does).
"""

from __future__ import annotations

from typing import Any, Final

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from espalier_format.errors import SourceError

METHOD: Final = "exl3"

_HOW: Final = "convert it, without losing a bit: espalier-format convert SRC DST --to espalier"


class RefusedExl3Config(QuantizationConfigMixin):
    """The ``quantization_config`` of an EXL3 checkpoint, which is never made: SourceError says what to do instead.

    transformers asks for it before it looks for weights, so nothing is downloaded for nothing.
    """

    quant_method: Any = METHOD

    def __init__(self, **_: Any) -> None:
        raise SourceError(f"transformers cannot run EXL3 checkpoints; {_HOW}")


def refuse_exl3() -> None:
    """Register the refusal, unless the method is registered already."""
    for mapping in (AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING):
        if METHOD in mapping:
            return
    AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = RefusedExl3Config


def not_espalier(found: str) -> str:
    """Say that a checkpoint of the format ``found`` is not Espalier, and how an EXL3 one becomes it."""
    message = f"is a checkpoint of the format {found}, not Espalier"
    return f"{message}; {_HOW}" if found == METHOD else message
