"""The corpus of bad checkpoints: read from ``spec/vectors/refusals.json`` (spec/conformance.md §10)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from espalier_format.spec import read_text

Operation = Literal["open", "verify", "verify --deep"]
"""What finds that a checkpoint is bad: opening reads headers and JSON only, verifying scales and the manifest too, and
verifying deeply decodes."""

Reader = Literal["espalier", "exl3", "plain"]
"""Who must refuse a checkpoint so: every reader of Espalier, or one that reads EXL3 or plain checkpoints as well."""


@dataclass(frozen=True, slots=True)
class RefusalCase:
    """A checkpoint that is bad in one way."""

    name: str
    code: str
    """The error code (spec/errors.md §2)."""
    operation: Operation
    reader: Reader
    why: str
    files: Mapping[str, bytes]
    """Name, with ``/`` between folders, to content."""


@lru_cache(maxsize=1)
def refusal_cases() -> tuple[RefusalCase, ...]:
    """Return the whole corpus, sorted by code and name."""
    document: dict[str, Any] = json.loads(read_text("vectors/refusals.json"))
    bases = {base: {name: _content(file) for name, file in files.items()} for base, files in document["bases"].items()}
    return tuple(
        RefusalCase(
            name,
            case["code"],
            case["operation"],
            case["reader"],
            case["why"],
            _changed(bases[case["base"]], document["bases"][case["base"]], case["files"]),
        )
        for name, case in document["cases"].items()
    )


def load_refusals() -> tuple[tuple[RefusalCase, str], ...]:
    """Return bad checkpoints that open, each with the module that must be refused when it is decoded."""
    return tuple((case, "layers.0.up_proj") for case in refusal_cases() if case.name == "scale-nan")


def _content(file: Mapping[str, str]) -> bytes:
    return file["text"].encode("ascii") if "text" in file else bytes.fromhex(file["hex"])


def _changed(
    base: Mapping[str, bytes], stated: Mapping[str, Mapping[str, str]], changes: Mapping[str, Any]
) -> dict[str, bytes]:
    files = dict(base)
    for name, change in changes.items():
        if change is None:
            del files[name]
        elif "edits" in change:
            form = "text" if "text" in stated[name] else "hex"
            files[name] = _edited(base[name], [(start, size, {form: new}) for start, size, new in change["edits"]])
        else:
            files[name] = _content(change)
    return dict(sorted(files.items()))


def _edited(data: bytes, edits: list[tuple[int, int, dict[str, str]]]) -> bytes:
    pieces, end = [], 0
    for start, size, new in edits:
        pieces += [data[end:start], _content(new)]
        end = start + size
    return b"".join([*pieces, data[end:]])
