"""The config.json of a Hugging Face checkpoint, made from the one of a quantized checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

from espalier_format.checkpoint.stated_quantization import drop_stated_quantization
from espalier_format.checkpoint.text_sections import text_sections
from espalier_format.codec.dtype_names import STORED_AS, parse_choice
from espalier_format.errors import SourceError

if TYPE_CHECKING:
    from espalier_format.codec.dtype_names import DtypeChoice

_CONFIG_NAMES: Mapping[str, str] = {dtype: name for name, dtype in STORED_AS.items()}
_DTYPE_KEYS = ("dtype", "torch_dtype")


def target_dtype(config: Mapping[str, object], choice: DtypeChoice) -> str:
    """Return the dtype to write, "BF16", "F16" or "F32".

    "source" is what config.json states: ``dtype`` or ``torch_dtype`` at the top level, else in its text part
    (``text_sections``); BF16 where it states none, or "auto". Raises SourceError for a stated dtype that is none of the
    three, UsageError for a ``choice`` that is none.
    """
    chosen = parse_choice(choice)
    if chosen != "source":
        return STORED_AS[chosen]
    for section in text_sections(config):
        for key in _DTYPE_KEYS:
            stated = section.get(key)
            if stated in (None, "auto"):
                continue
            dtype = STORED_AS.get(str(stated).removeprefix("torch."))
            if dtype is None:
                message = f"config.json states {key} {stated}, which weights are not written in; name a dtype instead"
                raise SourceError(message)
            return dtype
    return "BF16"


def hf_config(config: Mapping[str, object], *, explicit_dtype: str | None, has_head: bool) -> dict[str, object]:
    """Return config.json for plain weights; the keys that stay keep their order.

    ``quantization_config`` goes, and what it kept of an earlier quantization with it; so do those in text parts and
    ``compression_config``, its older name. ``explicit_dtype`` ("BF16", "F16" or "F32"), if given, replaces each stated
    dtype, under the key that states it. ``has_head``: a head tensor is written, so ``tie_word_embeddings`` is set
    false, at the top level and in the text part; some architectures take a missing key for true.
    """
    result = copy.deepcopy(dict(config))
    drop_stated_quantization(result)
    for section in text_sections(result):
        if has_head and isinstance(section, dict):
            section["tie_word_embeddings"] = False
    if explicit_dtype is not None:
        name = _CONFIG_NAMES[explicit_dtype]
        if not _restate_dtype(result, name):
            result["dtype"] = name
    return result


def _restate_dtype(section: dict[str, object], name: str) -> bool:
    """Replace every stated dtype of ``section`` and the sections in it; return whether there was one."""
    found = False
    for key, value in section.items():
        if key in _DTYPE_KEYS and (value is None or isinstance(value, str)):
            section[key] = name
            found = True
        elif isinstance(value, dict):
            found = _restate_dtype(value, name) or found
    return found
