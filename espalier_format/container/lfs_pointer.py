"""Git LFS pointers: what a clone without git-lfs holds in place of large files."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from espalier_format.errors import MalformedError

POINTER_BEGINNING: Final = b"version https://git-lfs"


def refuse_pointer(beginning: bytes, path: str | Path) -> None:
    """Raise ``MalformedError`` if a file that begins with these bytes is a pointer."""
    if beginning.startswith(POINTER_BEGINNING):
        raise MalformedError("is a Git LFS pointer, not the file itself; run: git lfs pull", path=path)
