"""How the dtypes of decoded weights are spelled: the one place that reads what a person or a program wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from espalier_format.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from espalier_format.codec.rounding import OutputDtype

DtypeName: TypeAlias = Literal["float32", "float16", "bfloat16", "fp32", "fp16", "bf16"]
"""A dtype by its name, as torch and config.json spell it, or by the short form that is taken as well."""

DtypeChoice: TypeAlias = Literal["source", "float32", "float16", "bfloat16", "fp32", "fp16", "bf16"]
"""A `DtypeName`, or "source": the dtype that the checkpoint states."""

STORED_AS: Final[Mapping[str, str]] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""The names of the dtypes that weights are decoded to, and how safetensors spells each."""

_NAMED: Final[Mapping[str, OutputDtype]] = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
}


def parse_dtype(name: str) -> OutputDtype:
    """Return the dtype of that name, a `DtypeName`; UsageError for any other."""
    return _find(name, tuple(STORED_AS))


def parse_choice(name: str) -> OutputDtype | Literal["source"]:
    """Return the dtype of that name, or "source"; ``name`` is a `DtypeChoice`, and UsageError says so of any other."""
    return "source" if name == "source" else _find(name, ("source", *STORED_AS))


def _find(name: str, expected: tuple[str, ...]) -> OutputDtype:
    try:
        return _NAMED[name]
    except (KeyError, TypeError):  # the latter for what has no hash
        raise UsageError("no such output dtype", expected=", ".join(expected), got=str(name)) from None
