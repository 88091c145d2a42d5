"""Where an operation reads and writes: what a person typed, checked before anything is opened."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from espalier_format.container.regular_file import is_regular
from espalier_format.errors import MissingFileError, OutputExistsError, SourceError, UsageError, WriteError
from espalier_format.hub.address import local_path


def folders(source: str | Path, destination: str | Path, purpose: str) -> tuple[Path, Path]:
    """Return source and destination of an operation that reads one folder and writes another.

    ``purpose`` says what for: "to convert it".

    Raises:
        UsageError: a path is empty, or the source is a repository on the Hub.
        SourceError: the source is a single file.
    """
    target = given_path(destination, "the output")
    folder = local_path(source, purpose)
    if is_regular(folder):
        raise SourceError("a single file is no checkpoint; give the folder", path=folder)
    return folder, target


def given_path(path: str | Path, what: str) -> Path:
    """Return a path that was given; UsageError for an empty text, which `Path` takes for the current folder."""
    if path == "":
        raise UsageError(f'the path of {what} is empty; the current folder is "."')
    return Path(path)


def report_place(report: Path, *, checkpoints: Iterable[Path], inputs: Iterable[Path]) -> Path:
    """Return the real path, behind all links, of a report that `replace_file` shall write when the work is done.

    Whether it can be written is found out before hours of work: it is a new file or a regular one that may be written.

    Raises:
        MissingFileError: its folder does not exist.
        OutputExistsError: something else is there, such as a folder, a device or a FIFO; or it is not writable.
        UsageError: it is, or lies in, one of the folders ``checkpoints``, or of the files and folders ``inputs``.
        WriteError: the operating system refuses the name, or links go round in a circle.
    """
    try:
        place = report.resolve()
        apart = [path.resolve() for path in checkpoints]
        read = [path.resolve() for path in inputs]
        # Of the name that was given: /dev/stdout and the like lead to what has no other.
        regular = not _exists(report) or (stat.S_ISREG(report.stat().st_mode) and place.is_file())
        folder_exists = place.parent.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a circle of links, up to Python 3.12
        reason = error.strerror if isinstance(error, OSError) else error
        shown = str(report).replace("\0", "\\0")
        raise WriteError(f"the report cannot be written there: {reason}", path=shown) from error
    if not folder_exists:
        raise MissingFileError("the folder of the report does not exist", path=report)
    if not regular:
        raise OutputExistsError("the report cannot be written there: what is there is no regular file", path=report)
    if not all(os.access(path, os.W_OK) for path in (place.parent, place) if path.exists()):
        raise OutputExistsError("the report cannot be written there: it is write-protected", path=report)
    if any(folder in (place, *place.parents) for folder in apart):
        raise UsageError("the report must lie outside of the checkpoints", path=report)
    if any(path in (place, *place.parents) for path in read):
        raise UsageError("the report would replace a file that is read", path=report)
    return place


def _exists(path: Path) -> bool:
    """Tell whether something is there, behind links; unlike `Path.exists` with every other error of the system."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
