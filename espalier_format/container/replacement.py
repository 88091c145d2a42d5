"""The old content of a destination: moved aside, then discarded or brought back, also by a later process.

What is to be done follows from what is there, so that it can be interrupted anywhere and be done again: `old` in the
folder for temporary files exists exactly while a commit is under way, and the notes beside it list what was moved
there and what takes its place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final

from espalier_format.container.index import INDEX_NAME
from espalier_format.container.names import CONFIG_NAME
from espalier_format.container.ownership import Notes, read_notes

OLD_NAME: Final = "old"
_DISCARDED: Final = "discarded"
_ATTEMPTS: Final = 16
_LAST: Final = {INDEX_NAME: 1, CONFIG_NAME: 2}


def settle(root: Path, work: Path, *, undo: bool) -> OSError | None:
    """End a commit that did not come to its end: bring the old content back.

    Without `undo`, the old content is discarded instead if all of the new is in its place: a run was killed just
    before it would have done so. Returns why something could not be brought back; it is in `work/old` then, and nothing
    of it has been removed. Goes on when it is interrupted: a second Ctrl-C must not cost the old content.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return _settle(root, work, undo=undo)
        except BaseException:  # noqa: BLE001, S112 - a few renames, all of which can be done again
            continue
    return _settle(root, work, undo=undo)


def discard(work: Path) -> None:
    """Remove the old content: by one rename it stops to be what a later run would bring back.

    Raises:
        OSError: nothing was removed.
    """
    discarded = work / _DISCARDED
    if discarded.exists():
        shutil.rmtree(discarded, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        (work / OLD_NAME).rename(discarded)
    shutil.rmtree(discarded, ignore_errors=True)


def _settle(root: Path, work: Path, *, undo: bool) -> OSError | None:
    old = work / OLD_NAME
    try:
        left = {path.name for path in old.iterdir()}
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    notes = read_notes(work)
    if left.issuperset(notes.old):  # everything was moved away: what stands there now is new
        if not undo and is_complete(root, work):
            discard(work)
            return None
        _take_back(root, work, notes)
    failure: OSError | None = None
    for name in sorted(left, key=lambda name: (_LAST.get(name, 0), name)):  # nothing looks complete before it is
        try:
            if os.path.lexists(root / name) and not (root / name).is_dir():
                raise FileExistsError("a file of that name is there again")
            (old / name).rename(root / name)
        except OSError as error:
            failure = failure or error
    if failure is None:
        old.rmdir()
    return failure


def is_complete(root: Path, work: Path) -> bool:
    """Tell whether all that the last commit was to put in its place is there."""
    new = read_notes(work).new
    return bool(new) and all(os.path.lexists(root / name) for name in new)


def is_unfinished(work: Path, found: AbstractSet[str]) -> bool:
    """Tell whether `found`, all that is in a folder, is an output under way and nothing else.

    Some of its files may have their names already, if it replaces nothing: a run was killed during the commit.
    """
    if found == {work.name}:
        return True
    if CONFIG_NAME in found or not (work / OLD_NAME).exists():
        return False
    notes = read_notes(work)
    return not notes.old and found - {work.name} <= {name.partition("/")[0] for name in notes.new}


def _take_back(root: Path, work: Path, notes: Notes) -> None:
    """Move the new files to where they came from: a run that goes on with them need not write them again."""
    for name in sorted(notes.new, key=lambda name: name != CONFIG_NAME):
        if _leads_out(root, name) or _leads_out(work, notes.new[name]):
            continue  # the notes may come from anybody, and behind a link is nothing of ours
        with contextlib.suppress(OSError):
            (root / name).rename(work / notes.new[name])
        with contextlib.suppress(OSError):
            (root / name).unlink()
    for folder in sorted(_folders(notes.new), key=lambda name: -name.count("/")):
        if not _leads_out(root, folder):
            with contextlib.suppress(OSError):
                (root / folder).rmdir()


def _leads_out(folder: Path, name: str) -> bool:
    """Tell whether a folder on the way to a file is a link."""
    return any((folder / parent).is_symlink() for parent in Path(name).parents if parent.name)


def _folders(names: Iterable[str]) -> set[str]:
    return {str(parent) for name in names for parent in Path(name).parents if parent.name}
