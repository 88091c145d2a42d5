"""Replace one small file so that readers find the old content or the new, never a part."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from espalier_format.container.durable import sync_folder
from espalier_format.errors import WriteError


def replace_file(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``: under a temporary name, made durable, then renamed. The mode of an old file stays.

    Raises:
        WriteError: the operating system refuses, or what is there is neither a regular file nor a link, which is not
            followed; it is as before. Or the new file is there, but its folder cannot be synced, so that a power cut
            may bring the old one back; the message says so.
    """
    if _is_special(path):
        raise WriteError("cannot write: what is there is no regular file", path=path)
    temporary = path.with_name(f".espalier-{secrets.token_hex(8)}.partial")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise WriteError(f"cannot write: {error.strerror or error}; the file is as before", path=path) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    try:
        sync_folder(path.parent)
    except OSError as error:
        text = f"written, but perhaps not for good: the folder cannot be synced: {error.strerror or error}"
        raise WriteError(text, path=path) from error


def _is_special(path: Path) -> bool:
    """Tell whether something is there that a renamed file would replace although it is no file."""
    try:
        mode = path.lstat().st_mode
    except (OSError, ValueError):  # nothing is there, or opening the new file tells what is wrong
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISLNK(mode))
