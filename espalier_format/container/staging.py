"""The transaction under `CheckpointWriter`: a destination folder that changes all at once or not at all.

Everything is written under temporary names in the folder `.espalier-in-progress` inside the destination, so that the
final rename stays in one file system. Old content is moved there first and comes back if anything fails.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from espalier_format.container.apart import check_apart
from espalier_format.container.durable import Folders, sync_folder, take_lock, write_error
from espalier_format.container.folder import check_name
from espalier_format.container.index import INDEX_NAME
from espalier_format.container.job import holds_work
from espalier_format.container.names import CONFIG_NAME, MANIFEST_NAME, PROGRESS_NAME
from espalier_format.container.ownership import (
    KEPT_NAMES,
    NOTES_NAME,
    check_own_folder,
    note_files,
    own_files,
    refuse_foreign_files,
)
from espalier_format.container.replacement import OLD_NAME, discard, is_complete, is_unfinished, settle
from espalier_format.errors import EspalierError, OutputExistsError, PathError, UsageError, WriteError

_LOCK: Final = "lock"
_ATTEMPTS: Final = 16


class Staging:
    """A destination folder under construction; see `open`, `file`, `commit` and `abort`.

    Not thread-safe; a lock file keeps other processes from the same destination.
    """

    def __init__(
        self,
        destination: Path,
        *,
        force: bool,
        sources: Sequence[Path],
        workspace: str | None = None,
        resume: bool = False,
    ) -> None:
        """Check that `destination` may become an output; nothing is changed.

        `workspace` names a folder for intermediate results, which `abort` leaves where it is unless it is empty.
        With `resume` a run finds the one that an earlier run left behind, for which `force` is not needed.

        Raises:
            UsageError: the destination is, holds or lies in one of `sources`.
            OutputExistsError: there is a file, or a folder that is not empty and may not be emptied: without `force`
                none may, with it one that holds our manifest or what an interrupted run left behind, and no files but
                those listed there, README.md and .gitattributes.
            WriteError: the destination cannot be looked at.
        """
        self.destination = destination
        self.force = force
        self.resume = resume
        self.workspace: Path | None = None
        try:
            self.root = _real(destination)
            self.work = self.root / PROGRESS_NAME
            if workspace is not None:
                self.workspace = self.work / workspace
            for source in sources:
                check_apart(self.root, source.resolve(), destination)
            self._check_free()
        except EspalierError:  # OutputExistsError is an OSError too
            raise
        except (OSError, RuntimeError, ValueError) as error:
            raise write_error(error, destination) from error
        self._lock: int | None = None
        self._replaces = False
        self._committed = False
        self._created: list[Path] = []
        self._count = 0
        self._staged: dict[str, Path] = {}
        self._folders: set[str] = set()

    def open(self) -> None:
        """Create the destination where it is missing, and the folder for temporary files; take the lock.

        Raises:
            OutputExistsError: another process is writing there, the folder has been filled meanwhile, or a link or a
                file is where a folder of ours belongs; nothing has been touched.
            WriteError: the operating system refuses.
        """
        try:
            self._make_folders(self.root)
            self._replaces = self._check_free()
            # Before the lock: once it is held, undoing may move what is in these.
            for folder in (self.work, self.work / OLD_NAME, self.workspace if self.resume else None):
                if folder is not None:
                    check_own_folder(folder)
            self.work.mkdir(exist_ok=True)
            self._lock = take_lock(self.work / _LOCK)
            if (self.work / OLD_NAME).exists():  # a run was killed while it replaced what was there
                failure = settle(self.root, self.work, undo=False)
                if failure is not None:
                    raise failure
                if self.workspace is not None and is_complete(self.root, self.work):
                    shutil.rmtree(self.workspace, ignore_errors=True)  # it has served its purpose
                self._replaces = self._check_free()
            for entry in self.work.iterdir():  # left behind by a run that was killed
                if entry.name not in (_LOCK, NOTES_NAME) and not (self.resume and entry == self.workspace):
                    _remove(entry)
            if self.workspace is not None:
                self.workspace.mkdir(exist_ok=True)
        except BlockingIOError as error:
            self._release()
            raise OutputExistsError("another process is writing there", path=self.destination) from error
        except OutputExistsError:
            if self._lock is None:
                self._remove_created()
            else:
                self.abort()
            raise
        except OSError as error:
            self.abort()
            raise self._failure(error) from error

    def file(self, name: str, path: Path | None = None) -> Path:
        """Return a fresh temporary path for the file that will be called `name`, or take `path` for it.

        Raises:
            PathError: unsafe name, or one in a hidden folder.
            UsageError: there is a file of that name already, or a folder, or a file where its folder would be.
        """
        if any(part.startswith(".") for part in check_name(name).split("/")[:-1]):
            raise PathError(f"file name {name!a} lies in a hidden folder", path=self.destination)
        if name in self._staged:
            raise UsageError(f"file name {name!a} is given twice", path=self.destination)
        folders = {str(parent) for parent in PurePosixPath(name).parents if parent.name}
        clash = next((folder for folder in sorted(folders) if folder in self._staged), None)
        if name in self._folders or clash is not None:
            text = f"{clash or name!a} cannot be both a file and a folder of the output"
            raise UsageError(text, path=self.destination)
        self._folders |= folders
        self._count += 1
        self._staged[name] = path or self.work / f"{self._count:06d}.partial"
        return self._staged[name]

    def commit(self, last: Iterable[str] = ()) -> None:
        """Give all files their names, each by an atomic rename: the manifest, the index and config.json last.

        A reader that finds config.json finds everything. What the folder held before is moved away first and removed
        when all is done; hidden sub-folders (.git), README.md and .gitattributes stay, also where the output has a file
        of that name. If anything fails, the old content is moved back.

        Raises:
            WriteError: the operating system refuses; the destination is as before.
            OutputExistsError: somebody else has put files there meanwhile.
        """
        ranks = {MANIFEST_NAME: 1, INDEX_NAME: 2, **dict.fromkeys(last, 3), CONFIG_NAME: 4}
        names = sorted(self._staged, key=lambda name: (ranks.get(name, 0), name))
        try:
            content = self._old_content()
            if content and not self._replaces:
                raise OutputExistsError("has been filled meanwhile", path=self.destination)  # noqa: TRY301 - nothing to undo
            own = own_files(self.root)
            refuse_foreign_files(self.root, own, self.destination)
            kept = {path.name for path in content if path.name in KEPT_NAMES}
            content = [path for path in content if path.name not in kept]
            names = [name for name in names if name not in kept]
            staged = {name: self._staged[name] for name in names}
            note_files(self.work, own.union(names), old=[path.name for path in content], new=staged)
            old = self.work / OLD_NAME
            old.mkdir()
            for path in content:
                _move(path, old / path.name)
            made = Folders(self.root)
            if content:
                sync_folder(old)
                made.sync()
            rank = 0
            for name in names:
                if ranks.get(name, 0) != rank:  # what came before must be on disk first
                    rank = ranks.get(name, 0)
                    made.sync()
                made.add(name)
                _move(self._staged[name], self.root / name)
            made.sync()
        except BaseException as error:
            failure = settle(self.root, self.work, undo=True)
            if failure is not None:
                raise self._failure(failure) from error
            if isinstance(error, OSError) and not isinstance(error, EspalierError):
                raise write_error(error, self.destination) from error
            raise
        self._committed = True
        # The output is complete: there is nothing left that a Ctrl-C could stop.
        for _ in range(_ATTEMPTS):
            try:
                self._clear()
            except KeyboardInterrupt:
                continue
            break

    def abort(self) -> None:
        """Remove everything that was written and created; old content stays, and so does a workspace that is in use.

        Old content that cannot be moved back stays where it is. Never raises OSError.
        """
        if self._committed:
            return
        if self._lock is not None:
            settle(self.root, self.work, undo=True)
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
        if not found or (self.resume and is_unfinished(self.work, found)):
            return False
        ours = MANIFEST_NAME in found or PROGRESS_NAME in found
        if not self.force:
            hint = "; --force replaces it" if ours else ""
            if self.workspace is not None and self.workspace.is_dir() and CONFIG_NAME not in found:
                both = "" if found == {PROGRESS_NAME} else " with --force"
                hint = f"; --resume{both} goes on with it, --force alone begins anew"
            if self.resume and CONFIG_NAME in found and is_complete(self.root, self.work):
                raise OutputExistsError("holds the complete output already; --force replaces it", path=self.destination)
            what = "holds an unfinished output" if found == {PROGRESS_NAME} else "is not empty"
            raise OutputExistsError(f"destination {what}{hint}", path=self.destination)
        if not ours:
            raise OutputExistsError(
                f"destination is not empty, and has no {MANIFEST_NAME} to show that this program wrote it",
                path=self.destination,
            )
        refuse_foreign_files(self.root, own_files(self.root), self.destination)
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
        if self._lock is None:
            with contextlib.suppress(OSError):
                self.work.rmdir()
            return
        kept = self._kept_entries()
        with contextlib.suppress(OSError):
            for entry in self.work.iterdir():
                if entry.name not in kept and entry.name != _LOCK:
                    with contextlib.suppress(OSError):
                        _remove(entry)
        if not kept:
            shutil.rmtree(self.work, ignore_errors=True)
        self._release()

    def _kept_entries(self) -> set[str]:
        """Return what must stay when the output does not come about: content that is nowhere else, and its notes."""
        kept = {OLD_NAME} if (self.work / OLD_NAME).exists() else set()
        if self.workspace is not None and self.keeps_work:
            kept.add(self.workspace.name)
        if kept or not (self.root / MANIFEST_NAME).exists():
            with contextlib.suppress(OSError):
                notes = NOTES_NAME if (self.work / NOTES_NAME).exists() and (kept or self._old_content()) else None
                kept.update([notes] if notes else [])
        return kept

    def _clear(self) -> None:
        """Remove the old content and the folder for temporary files after a commit."""
        self._created.clear()
        with contextlib.suppress(OSError):
            discard(self.work)
        if not (self.work / OLD_NAME).exists():
            shutil.rmtree(self.work, ignore_errors=True)
        self._release()
        with contextlib.suppress(OSError):
            sync_folder(self.root)

    def _failure(self, error: OSError) -> WriteError:
        """Return the error to raise, which says where the old content is unless it is back in its place."""
        old = self.work / OLD_NAME
        if not old.exists():
            return write_error(error, self.destination, kept=self.keeps_work)
        reason = error.strerror or str(error)
        return WriteError(
            f"cannot write: {reason}; what could not be moved back of the old content is in {old}",
            path=self.destination,
        )

    @property
    def keeps_work(self) -> bool:
        """Whether the workspace holds what a later run can go on with."""
        return self.workspace is not None and holds_work(self.workspace)

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _move(before: Path, after: Path) -> None:
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
