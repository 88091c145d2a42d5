"""What a transaction needs of the file system: names that are on disk, a lock, and its refusals in our words."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Final

from espalier_format.errors import WriteError

_KEPT: Final = "; what is finished is kept, and --resume goes on from there"
_REMOVED: Final = "; what was written has been removed"


class Folders:
    """The folders that renames went to, which must be synced."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._touched = {root}

    def add(self, name: str) -> None:
        """Make the folder of a file, if it is missing, and remember it."""
        target = (self._root / name).parent
        target.mkdir(parents=True, exist_ok=True)
        while target != self._root:
            self._touched.add(target)
            target = target.parent

    def sync(self) -> None:
        """Make the names in all of them durable, the deepest first."""
        for folder in sorted(self._touched, reverse=True):
            sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot
            raise
    finally:
        os.close(descriptor)


def append_durably(path: Path, data: bytes) -> None:
    """Append to a file, which is made where it is missing, and put it on disk; a link is not followed.

    Raises:
        OSError: the operating system refuses, or there is a link.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with open(descriptor, "ab") as file:  # noqa: PTH123 - it is no path
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_error(error: Exception, path: str | Path, *, kept: bool = False) -> WriteError:
    """Return the `WriteError` for what the operating system said; `kept` says that finished files stay."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    rest = _KEPT if kept else _REMOVED
    return WriteError(f"cannot write: {reason}{rest}", path=str(path).replace("\0", "\\0"))


def tell_outcome(error: BaseException | None, *, kept: bool) -> None:
    """Make what `write_error` returned say what has come of the output, now that it is known; others stay as they are.

    When a write fails, files that were written before may yet turn out to be finished, or nothing may be.
    """
    if not isinstance(error, WriteError):
        return
    reason = error.message.removesuffix(_KEPT).removesuffix(_REMOVED)
    if reason != error.message:
        error.message = f"{reason}{_KEPT if kept else _REMOVED}"
        error.args = (error.message,)


def take_lock(path: Path) -> int:
    """Lock a file, which is made where it is missing, and return its descriptor: closing it gives the lock back.

    Raises:
        BlockingIOError: another process has it.
        OSError: the operating system refuses.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The process that had it may have finished, and removed the file, between the two calls.
        if not (path.exists() and os.path.samestat(os.fstat(descriptor), path.lstat())):
            raise BlockingIOError(errno.EAGAIN, "the lock has just been removed")  # noqa: TRY301 - closed below
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
