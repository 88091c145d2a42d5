"""What every conversion writes besides tensors, and how it reports progress."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from espalier_format.progress import NullProgress
from espalier_format.schema.config import Producer
from espalier_format.schema.manifest import UNLISTED_FILES, FileEntry, Manifest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from espalier_format.container.hashing import FileRecord
    from espalier_format.progress import Progress

PACKAGE: Final = "espalier-format"


def this_producer() -> Producer:
    """Return the name and version of this package."""
    return Producer(name=PACKAGE, version=version(PACKAGE))


def manifest_bytes(records: Mapping[str, FileRecord], digests: Mapping[str, str] | None = None) -> bytes:
    """Return the manifest of an output of which ``records`` lists all files (spec/manifest.md)."""
    files = {
        name: FileEntry(size=record.size, sha256=record.sha256, git_blob_sha1=record.git_blob_sha1)
        for name, record in sorted(records.items())
        if name not in UNLISTED_FILES
    }
    manifest = Manifest(
        manifest_version=1, producer=this_producer(), files=files, decode_digests=dict(digests) if digests else None
    )
    return (json.dumps(manifest.to_json(), indent=2) + "\n").encode("ascii")


class Meter:
    """Passes bytes on to a ``Progress`` so that they add up to the total that was announced.

    The exact size of the output is known only at its end; the total is the size of the input.
    """

    def __init__(self, progress: Progress | None, total_bytes: int, label: str) -> None:
        self._progress = NullProgress() if progress is None else progress
        self._left = total_bytes
        self._progress.start(total_bytes, label)

    def advance(self, n_bytes: int) -> None:
        """Report ``n_bytes`` more, as far as the total allows."""
        step = min(n_bytes, self._left)
        if step:
            self._left -= step
            self._progress.advance(step)

    def finish(self) -> None:
        """Report the rest, and the end."""
        self.advance(self._left)
        self._progress.finish()
