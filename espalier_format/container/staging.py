"""The transaction under `CheckpointWriter`: a destination folder that changes all at once or not at all.

Everything is written under temporary names in the folder `.espalier-in-progress` inside the destination, so that the
final rename stays in one file system. Old content is moved there first and comes back if anything fails.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from espalier_format.container.folder import check_name
from espalier_format.container.index import INDEX_NAME
from espalier_format.container.names import CONFIG_NAME, MANIFEST_NAME, PROGRESS_NAME
from espalier_format.errors import EspalierError, OutputExistsError, PathError, UsageError, WriteError

_LOCK: Final = "lock"
_OLD: Final = "old"


class Staging:
    """A destination folder under construction; see `open`, `file`, `commit` and `abort`.

    Not thread-safe; a lock file keeps other processes from the same destination.
    """

    def __init__(self, destination: Path, *, force: bool, sources: Sequence[Path]) -> None:
        """Check that `destination` may become an output; nothing is changed.

        Raises:
            UsageError: the destination is, holds or lies in one of `sources`.
            OutputExistsError: there is a file, or a folder that is not empty and may not be emptied: without `force`
                none may, with it one that holds our manifest or what an interrupted run left behind.
            WriteError: the destination cannot be looked at.
        """
        self.destination = destination
        self.force = force
        try:
            self.root = _real(destination)
            for source in sources:
                _check_apart(self.root, source.resolve(), destination)
            self._check_free()
        except EspalierError:  # OutputExistsError is an OSError too
            raise
        except (OSError, RuntimeError, ValueError) as error:
            raise write_error(error, destination) from error
        self.work = self.root / PROGRESS_NAME
        self._lock: int | None = None
        self._replaces = False
        self._created: list[Path] = []
        self._count = 0
        self._staged: dict[str, Path] = {}

    def open(self) -> None:
        """Create the destination where it is missing, and the folder for temporary files; take the lock.

        Raises:
            OutputExistsError: another process is writing there, or the folder has been filled meanwhile.
            WriteError: the operating system refuses.
        """
        try:
            self._make_folders(self.root)
            self._replaces = self._check_free()
            if self.work.is_symlink():
                raise OutputExistsError("is a link, and not ours", path=self.work)  # noqa: TRY301 - undone below
            self.work.mkdir(exist_ok=True)
            self._lock = os.open(self.work / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for entry in self.work.iterdir():  # left behind by a run that was killed
                if entry.name != _LOCK:
                    _remove(entry)
        except BlockingIOError as error:
            self._release()
            raise OutputExistsError("another process is writing there", path=self.destination) from error
        except OutputExistsError:
            self._remove_created()
            raise
        except OSError as error:
            self.abort()
            raise write_error(error, self.destination) from error

    def file(self, name: str) -> Path:
        """Return a fresh temporary path for the file that will be called `name`.

        Raises:
            PathError: unsafe name, or one in a hidden folder.
            UsageError: there is a file of that name already.
        """
        if any(part.startswith(".") for part in check_name(name).split("/")[:-1]):
            raise PathError(f"file name {name!a} lies in a hidden folder", path=self.destination)
        if name in self._staged:
            raise UsageError(f"file name {name!a} is given twice", path=self.destination)
        self._count += 1
        self._staged[name] = self.work / f"{self._count:06d}.partial"
        return self._staged[name]

    def commit(self, last: Iterable[str] = ()) -> None:
        """Give all files their names, each by an atomic rename: the manifest, the index and config.json last.

        A reader that finds config.json finds everything. What the folder held before is moved away first and removed
        when all is done; hidden sub-folders (.git) stay. If anything fails, the old content is moved back.

        Raises:
            WriteError: the operating system refuses; the destination is as before.
            OutputExistsError: somebody else has put files there meanwhile.
        """
        ranks = {MANIFEST_NAME: 1, INDEX_NAME: 2, **dict.fromkeys(last, 3), CONFIG_NAME: 4}
        names = sorted(self._staged, key=lambda name: (ranks.get(name, 0), name))
        moved: list[tuple[Path, Path]] = []
        old = self.work / _OLD
        try:
            old.mkdir()
            content = self._old_content()
            if content and not self._replaces:
                raise OutputExistsError("has been filled meanwhile", path=self.destination)  # noqa: TRY301 - rolled back below
            for path in content:
                _move(path, old / path.name, moved)
            made = _Folders(self.root)
            rank = 0
            for name in names:
                if ranks.get(name, 0) != rank:  # what came before must be on disk first
                    rank = ranks.get(name, 0)
                    made.sync()
                made.add(name)
                _move(self._staged[name], self.root / name, moved)
            made.sync()
        except BaseException as error:
            for before, after in reversed(moved):
                with contextlib.suppress(OSError):
                    after.rename(before)
            made_folders = {self.root / parent for name in names for parent in Path(name).parents if parent.name}
            for folder in sorted(made_folders, reverse=True):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            if isinstance(error, OSError) and not isinstance(error, EspalierError):
                raise write_error(error, self.destination) from error
            raise
        self._created.clear()
        self._remove_work()
        with contextlib.suppress(OSError):
            sync_folder(self.root)

    def abort(self) -> None:
        """Remove everything that was written and created; old content stays. Never raises OSError."""
        self._remove_work()
        self._remove_created()

    def _check_free(self) -> bool:
        """Return whether there is content that may be replaced; False if there is none."""
        try:
            found = {entry.name for entry in os.scandir(self.root)}
        except FileNotFoundError:
            return False
        except NotADirectoryError as error:
            raise OutputExistsError("exists and is not a folder", path=self.destination) from error
        if not found:
            return False
        ours = MANIFEST_NAME in found or PROGRESS_NAME in found
        if not self.force:
            hint = "; --force replaces it" if ours else ""
            what = "holds an unfinished output" if found == {PROGRESS_NAME} else "is not empty"
            raise OutputExistsError(f"destination {what}{hint}", path=self.destination)
        if not ours:
            raise OutputExistsError(
                f"destination is not empty, and has no {MANIFEST_NAME} to show that this program wrote it",
                path=self.destination,
            )
        return True

    def _old_content(self) -> list[Path]:
        """Return what to move away, config.json first so that what remains never looks complete."""
        entries = [
            entry
            for entry in os.scandir(self.root)
            if not (entry.name.startswith(".") and entry.is_dir(follow_symlinks=False))
        ]
        first = {CONFIG_NAME: 0, INDEX_NAME: 1}
        return [Path(entry.path) for entry in sorted(entries, key=lambda entry: first.get(entry.name, 2))]

    def _make_folders(self, folder: Path) -> None:
        missing = [folder]
        while not missing[-1].parent.exists():
            missing.append(missing[-1].parent)
        for path in reversed(missing):
            try:
                path.mkdir()
            except FileExistsError:
                continue
            self._created.append(path)

    def _remove_created(self) -> None:
        while self._created:
            with contextlib.suppress(OSError):
                self._created.pop().rmdir()

    def _remove_work(self) -> None:
        if self._lock is not None:
            # config.json first: the old content must not look complete while it goes.
            with contextlib.suppress(OSError):
                (self.work / _OLD / CONFIG_NAME).unlink(missing_ok=True)
            shutil.rmtree(self.work, ignore_errors=True)
            self._release()
        else:
            with contextlib.suppress(OSError):
                self.work.rmdir()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class _Folders:
    """The folders that renames went to, which must be synced."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._touched = {root}

    def add(self, name: str) -> None:
        target = (self._root / name).parent
        target.mkdir(parents=True, exist_ok=True)
        while target != self._root:
            self._touched.add(target)
            target = target.parent

    def sync(self) -> None:
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


def write_error(error: Exception, path: str | Path) -> WriteError:
    """Return the `WriteError` for what the operating system said."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return WriteError(f"cannot write: {reason}; what was written has been removed", path=str(path).replace("\0", "\\0"))


def _move(before: Path, after: Path, moved: list[tuple[Path, Path]]) -> None:
    # Listed first: an interrupt between the two must not lose track of the file.
    moved.append((before, after))
    before.rename(after)


def _remove(path: Path) -> None:
    if stat.S_ISDIR(path.lstat().st_mode):
        shutil.rmtree(path)
    else:
        path.unlink()


def _real(destination: Path) -> Path:
    if destination.is_symlink() and not destination.exists():
        raise OutputExistsError("is a link that leads nowhere", path=destination)
    return destination.resolve()


def _check_apart(root: Path, source: Path, destination: Path) -> None:
    if root == source or root in source.parents or source in root.parents:
        raise UsageError("source and destination must be apart from each other", path=destination)
