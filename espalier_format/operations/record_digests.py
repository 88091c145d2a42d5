"""Add decode digests to a manifest that is already there."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from espalier_format.checkpoint.files import MANIFEST_NAME
from espalier_format.errors import WriteError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from espalier_format.container.folder import CheckpointFolder
    from espalier_format.schema.manifest import Manifest


def record_digests(folder: CheckpointFolder, manifest: Manifest, digests: Mapping[str, str]) -> int:
    """Put ``digests`` into the manifest and return how many were not there; nothing is written if none.

    The file is replaced atomically, after the new one is on disk: readers find the old manifest or the new one.

    Raises:
        WriteError: the operating system refuses; the manifest is as before.
    """
    stated = manifest.decode_digests or {}
    added = [name for name in digests if name not in stated]
    if not added:
        return 0
    complete = manifest.model_copy(update={"decode_digests": {**stated, **digests}})
    data = (json.dumps(complete.to_json(), indent=2) + "\n").encode("ascii")
    _replace(folder.root / MANIFEST_NAME, data)
    return len(added)


def _replace(path: Path, data: bytes) -> None:
    temporary: str | None = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=".espalier-", suffix=".partial", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files private; the manifest keeps the mode it had.
        Path(temporary).chmod(path.stat().st_mode & 0o777)
        Path(temporary).replace(path)
        temporary = None
        _sync(path.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        raise WriteError(f"cannot write: {reason}; the manifest is as before", path=path) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()


def _sync(folder: Path) -> None:
    """Make the new name durable, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
