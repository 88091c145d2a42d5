"""The config.json of a Hugging Face checkpoint, made from the one of a quantized checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Literal

from espalier_format.errors import SourceError, UsageError

DtypeChoice = Literal["source", "bf16", "fp16", "fp32"]

EXPLICIT: Mapping[str, str] = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}

_BY_CONFIG_NAME: Mapping[str, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_CONFIG_NAMES: Mapping[str, str] = {dtype: name for name, dtype in _BY_CONFIG_NAME.items()}
_DTYPE_KEYS = ("dtype", "torch_dtype")
_TEXT_PARTS = ("text_config", "language_config", "llm_config")


def target_dtype(config: Mapping[str, object], choice: DtypeChoice) -> str:
    """Return the dtype to write, "BF16", "F16" or "F32".

    "source" is what config.json states: ``dtype`` or ``torch_dtype`` at the top level, else in its text part
    (``text_config``); BF16 where it states none, or "auto". Raises SourceError for a stated dtype that is none of the
    three, UsageError for a ``choice`` that is none.
    """
    if choice != "source":
        if choice not in EXPLICIT:
            raise UsageError("no such dtype", expected=("source", *EXPLICIT), got=choice)
        return EXPLICIT[choice]
    for section in (config, *(config.get(part) for part in _TEXT_PARTS)):
        if not isinstance(section, Mapping):
            continue
        for key in _DTYPE_KEYS:
            stated = section.get(key)
            if stated in (None, "auto"):
                continue
            dtype = _BY_CONFIG_NAME.get(str(stated).removeprefix("torch."))
            if dtype is None:
                message = f"config.json states {key} {stated}, which weights are not written in; name a dtype instead"
                raise SourceError(message)
            return dtype
    return "BF16"


def hf_config(config: Mapping[str, object], *, explicit_dtype: str | None, has_head: bool) -> dict[str, object]:
    """Return config.json for plain weights; the keys that stay keep their order.

    ``quantization_config`` goes, and what it kept of an earlier quantization with it. ``explicit_dtype`` ("BF16", "F16"
    or "F32"), if given, replaces each stated dtype, under the key that states it. ``has_head``: a head tensor is
    written, so ``tie_word_embeddings`` is set false, at the top level and in the text part; some architectures take a
    missing key for true.
    """
    result = copy.deepcopy(dict(config))
    for section in (result, *(result.get(part) for part in _TEXT_PARTS)):
        if not isinstance(section, dict):
            continue
        section.pop("quantization_config", None)
        if has_head:
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
