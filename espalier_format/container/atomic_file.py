"""Replace one small file so that readers find the old content or the new, never a part."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from espalier_format.errors import WriteError


def replace_file(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``: under a temporary name, made durable, then renamed. The mode of an old file stays.

    Raises:
        WriteError: the operating system refuses; what was at ``path`` is as before.
    """
    temporary: Path | None = None
    try:
        descriptor, name = tempfile.mkstemp(prefix=".espalier-", suffix=".partial", dir=path.parent)
        temporary = Path(name)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(_mode(path))
        temporary.replace(path)
        temporary = None
        _sync(path.parent)
    except OSError as error:
        raise WriteError(f"cannot write: {error.strerror or error}; the file is as before", path=path) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()


def _mode(path: Path) -> int:
    """Return the mode of the file, or the one that an ordinary new file would get: mkstemp makes private ones."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mode & 0o777
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o666 & ~mask


def _sync(folder: Path) -> None:
    """Make the new name durable, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
