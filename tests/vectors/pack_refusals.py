"""Write the corpus of bad checkpoints as one JSON file: a few base checkpoints, and what each case changes in one.

`espalier_format.conformance.refusals` does the way back; a test compares what it makes with make_bad.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

ABOUT = (
    "Checkpoints that must be refused, and why. A case is the files of its base but for the changes in files: "
    "edits of a base file, whole files as text or hex, null for a file that is not there (spec/conformance.md)."
)


def read_folder(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def document(bases: Mapping[str, Mapping[str, bytes]], cases: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the file's JSON; each case has the key ``content``, its files, in place of ``base`` and ``files``."""
    packed = {}
    for name, case in cases.items():
        content = case["content"]
        choices = {base: _changes(files, content) for base, files in bases.items()}
        base = min(choices, key=lambda key: len(json.dumps(choices[key])))
        kept = {key: value for key, value in case.items() if key != "content"}
        packed[name] = {**kept, "base": base, "files": choices[base]}
    whole = {name: {file: _whole(data) for file, data in files.items()} for name, files in bases.items()}
    return {"about": ABOUT, "bases": whole, "cases": packed}


def dumps(packed: dict[str, Any]) -> bytes:
    """Return the text of the file: one line per base and per case."""
    lines = [f'  "about": {json.dumps(packed["about"])}']
    for key in ("bases", "cases"):
        body = ",\n".join(f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in packed[key].items())
        lines.append(f'  "{key}": {{\n{body}\n  }}')
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode("ascii")


def _whole(data: bytes) -> dict[str, str]:
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError:
        return {"hex": data.hex()}
    return {"text": text} if "\0" not in text else {"hex": data.hex()}


def _changes(base: Mapping[str, bytes], content: Mapping[str, bytes]) -> dict[str, Any]:
    changes: dict[str, Any] = {name: None for name in base if name not in content}
    for name, data in content.items():
        if name in base and base[name] != data:
            changes[name] = _smaller(_edits(base[name], data), _whole(data))
        elif name not in base:
            changes[name] = _whole(data)
    return dict(sorted(changes.items()))


def _smaller(edits: dict[str, Any] | None, whole: dict[str, str]) -> dict[str, Any]:
    return whole if edits is None or len(json.dumps(whole)) <= len(json.dumps(edits)) else edits


def _edits(old: bytes, new: bytes) -> dict[str, Any] | None:
    """Return [offset, length, replacement] of runs of the base file, or None for content that its notation lacks."""
    text = "text" in _whole(old)
    if text and "text" not in _whole(new):
        return None
    start = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    matcher = SequenceMatcher(None, old[start:], new[start:], autojunk=False)
    edits: list[list[Any]] = []
    end_old = end_new = 0
    for block in matcher.get_matching_blocks():
        if block.size < 12 and block.size:
            continue  # short common runs cost more than they save
        if block.a > end_old or block.b > end_new:
            piece = new[start + end_new : start + block.b]
            edits.append([start + end_old, block.a - end_old, piece.decode("ascii") if text else piece.hex()])
        end_old, end_new = block.a + block.size, block.b + block.size
    return {"edits": edits}
