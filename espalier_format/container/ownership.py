"""Which files of a destination this program wrote: by the manifest there, and by the notes of an interrupted run."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from espalier_format.container.folder import check_name
from espalier_format.container.json_document import read_json_object
from espalier_format.container.names import MANIFEST_NAME, PROGRESS_NAME, SIGNATURE_NAME
from espalier_format.errors import EspalierError, OutputExistsError

KEPT_NAMES: Final = frozenset({"README.md", ".gitattributes"})
"""Files that people edit and no manifest lists: they stay where they are."""

NOTES_NAME: Final = "names.json"
"""Name of the notes in the folder for temporary files."""

_SHOWN: Final = 3


def own_files(root: Path) -> frozenset[str]:
    """Return the names of the files in `root` that this program wrote, or began to put there.

    Raises:
        OutputExistsError: there is a manifest that cannot be read.
    """
    found: set[str] = set()
    for path in (root / MANIFEST_NAME, root / PROGRESS_NAME / NOTES_NAME):
        if not os.path.lexists(path):
            continue
        try:
            found.update(read_json_object(path).get("files") or ())
        except (EspalierError, TypeError) as error:
            text = (
                "cannot be read, so nothing shows which files there espalier-format wrote; remove the folder yourself"
            )
            raise OutputExistsError(text, path=path) from error
    return frozenset(found)


class Notes(NamedTuple):
    """What a commit is about to do: `old` are the entries it moves away, `new` the files it puts in their place.

    `new` gives for each of them where it was before, relative to the folder for temporary files.
    """

    old: frozenset[str]
    new: Mapping[str, str]


def note_files(work: Path, names: Iterable[str], *, old: Iterable[str], new: Mapping[str, Path]) -> None:
    """Write down, on disk, that these files belong to the output, and what a commit does with them.

    The run may be killed before its manifest is there.
    """
    staged = {name: str(path.relative_to(work)) for name, path in sorted(new.items())}
    document = {"files": sorted(names), "old": sorted(old), "new": staged}
    fresh = work / f"{NOTES_NAME}.partial"
    with fresh.open("w", encoding="ascii") as notes:
        json.dump(document, notes)
        notes.flush()
        os.fsync(notes.fileno())
    fresh.replace(work / NOTES_NAME)


def read_notes(work: Path) -> Notes:
    """Return the notes in the folder for temporary files; without readable ones nothing is old or new."""
    try:
        document = read_json_object(work / NOTES_NAME)
        notes = Notes(frozenset(document.get("old") or ()), dict(document.get("new") or {}))
        for name in (*notes.new.keys(), *notes.new.values()):
            check_name(name)  # the folder may come from anybody
        return notes  # noqa: TRY300 - what is unsafe is unreadable
    except (EspalierError, TypeError, ValueError):
        return Notes(frozenset(), {})


def refuse_foreign_files(root: Path, own: frozenset[str], shown_as: Path) -> None:
    """Refuse to empty a folder that holds anybody else's files; those in hidden folders at its top level stay anyway.

    Raises:
        OutputExistsError: it does; the message names the first of them, and the folder as `shown_as`.
    """
    known = own | KEPT_NAMES | {MANIFEST_NAME, SIGNATURE_NAME}
    foreign = sorted(name for name in _files(root) if name not in known)
    if foreign:
        listed = ", ".join(foreign[:_SHOWN]) + (", …" if len(foreign) > _SHOWN else "")
        raise OutputExistsError(
            f"holds files that espalier-format did not write ({listed}); move them away", path=shown_as
        )


def check_own_folder(path: Path) -> None:
    """Refuse what stands where a folder of ours belongs and is none: what is behind a link is somebody else's.

    Raises:
        OutputExistsError: a link, a file or the like is there.
        OSError: the operating system does not say what is there.
    """
    mode = _mode(path)
    if mode is not None and not stat.S_ISDIR(mode):
        raise OutputExistsError(f"is {_link_or(mode, 'no folder')}, and not ours; move it away", path=path)


def check_own_file(path: Path) -> None:
    """Refuse what stands where a file of ours belongs and is no regular file, as `check_own_folder` does."""
    mode = _mode(path)
    if mode is not None and not stat.S_ISREG(mode):
        raise OutputExistsError(f"is {_link_or(mode, 'not a regular file')}, and not ours; move it away", path=path)


def check_own_flat_folder(path: Path) -> None:
    """Refuse a folder of ours that is none, or that holds a folder: nothing of ours is in one there."""
    check_own_folder(path)
    if not os.path.lexists(path):
        return
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                raise OutputExistsError("is a folder, and not ours; move it away", path=entry.path)


def is_sole_file(path: Path) -> bool:
    """Tell whether a regular file is there that has no other name: nobody else can be holding or changing it."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def _mode(path: Path) -> int | None:
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return None


def _link_or(mode: int, what: str) -> str:
    return "a link" if stat.S_ISLNK(mode) else what


def _files(root: Path) -> list[str]:
    """Return the relative names of everything that is no folder, links included, outside hidden top-level folders."""
    found: list[str] = []
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(root / prefix) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    found.append(prefix + entry.name)
                elif prefix or not entry.name.startswith("."):
                    pending.append(f"{prefix}{entry.name}/")
    return found
