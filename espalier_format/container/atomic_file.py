"""Replace one small file so that readers find the old content or the new, never a part."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from espalier_format.errors import WriteError


def replace_file(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``: under a temporary name, made durable, then renamed. The mode of an old file stays.

    Raises:
        WriteError: the operating system refuses; what was at ``path`` is as before.
    """
    temporary = path.with_name(f".espalier-{secrets.token_hex(8)}.partial")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync(path.parent)
    except OSError as error:
        raise WriteError(f"cannot write: {error.strerror or error}; the file is as before", path=path) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _sync(folder: Path) -> None:
    """Make the new name durable, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
