"""What cases need while they run: a carrier for tensors, and a place on disk for checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from espalier_format.conformance.arrays import Carrier


class Bench:
    """A carrier, and a temporary folder that is removed at the end; a context manager."""

    def __init__(self, device: str | None = None) -> None:
        self.carrier = Carrier(device)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder."""
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def folder(self, name: str, files: Mapping[str, bytes]) -> Path:
        """Return a folder with these files; it is written at the first call of that name."""
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="espalier-conformance-")
        target = Path(self._temporary.name, *name.split("/"))
        if not target.is_dir():
            write_files(target, files)
        return target


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files, names with ``/`` between folders, into a folder, which is made."""
    folder.mkdir(parents=True)
    for name, data in files.items():
        path = folder.joinpath(*name.split("/"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
