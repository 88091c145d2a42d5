"""What an unfinished output was begun with: only a run that agrees in all of it may go on with its work."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from espalier_format.container.atomic_file import replace_file
from espalier_format.container.durable import write_error
from espalier_format.container.json_document import parse_json
from espalier_format.container.ownership import check_own_file, check_own_flat_folder
from espalier_format.container.regular_file import read_regular
from espalier_format.errors import EspalierError, UsageError
from espalier_format.limits import MAX_JSON_BYTES

JOB_NAME: Final = "job.json"
"""File in the workspace of an output that states the job."""

_COMMAND: Final = "command"
_SHOWN: Final = 3
_LONGEST: Final = 40
"""Characters of a name or value that a person reads; digests are longer, and say nothing to one."""


def take_over(
    workspace: Path, job: Mapping[str, object], *, folders: Iterable[str] = (), files: Iterable[str] = ()
) -> bool:
    """Return whether `workspace` holds the work of this very job; where it states none, empty it and write it down.

    `job` is a JSON object. Its member "command" names what is done, the others everything that decides about the
    result; their names are what a person reads when they differ, and their values where they are short. `folders`
    and `files` are what else the caller has in the workspace: all of it is looked at before anything is changed.

    Raises:
        OutputExistsError: a link, or what is not of its kind, is in the place of one of them, or a folder in a folder.
        UsageError: what is there belongs to another command, or to a job with other settings or another source.
        WriteError: the operating system refuses.
    """
    path = workspace / JOB_NAME
    text = json.dumps(job, indent=1, sort_keys=True)
    try:
        for folder in folders:
            check_own_flat_folder(workspace / folder)
        for name in (JOB_NAME, *files):
            check_own_file(workspace / name)
    except EspalierError:  # OutputExistsError is an OSError too
        raise
    except OSError as error:
        raise write_error(error, workspace.parent.parent, kept=holds_work(workspace)) from error
    if not path.exists():
        _empty(workspace)
        replace_file(path, text.encode("ascii"))
        return False
    data = read_regular(path, MAX_JSON_BYTES)
    try:  # bounded: what is there may be anything
        earlier = parse_json(data, path=path, max_string=MAX_JSON_BYTES)
    except EspalierError:
        earlier = None
    if not isinstance(earlier, dict) or _COMMAND not in earlier:
        raise UsageError(
            f"the unfinished output does not say what it was begun with ({JOB_NAME} is damaged); --force begins anew",
            path=workspace.parent.parent,
        )
    stated: dict[str, object] = earlier
    wanted: dict[str, object] = json.loads(text)
    different = sorted(key for key in wanted.keys() | stated.keys() if stated.get(key) != wanted.get(key))
    if different:
        names = [_COMMAND] if _COMMAND in different else different
        raise UsageError(
            f"the unfinished output was begun with {_in_words(names, stated, wanted)}; --force begins anew",
            path=workspace.parent.parent,
        )
    return True


def _in_words(names: Iterable[str], earlier: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Return how the members `names` of two jobs differ: "another seed (1, now 2) and another source".

    Those come first whose values can be shown on both sides; of many, only some are named.
    """
    shown, named = [], []
    for name in names:
        values = [_value(job[name]) for job in (earlier, now) if name in job]
        if len(values) == 2 and None not in values:
            shown.append(f"another {name[:_LONGEST]} ({values[0]}, now {values[1]})")
        else:
            named.append(f"another {name[:_LONGEST]}")
    both = shown + named
    more = [f"{len(both) - _SHOWN} more"] if len(both) > _SHOWN else []
    return " and ".join(both[:_SHOWN] + more)


def _value(value: object) -> str | None:
    """Return a value in few characters, or None for what a person cannot compare: objects, arrays and digests."""
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value) if isinstance(value, bool | int | float) else ""
    return text if 0 < len(text) <= _LONGEST else None


def holds_work(workspace: Path) -> bool:
    """Tell whether `workspace` holds anything to go on with: the job alone, and empty folders, are nothing."""
    try:
        return any(
            any(entry.iterdir()) if entry.is_dir() and not entry.is_symlink() else entry.name != JOB_NAME
            for entry in workspace.iterdir()
        )
    except OSError:
        return False


def _empty(workspace: Path) -> None:
    """Remove what belongs to no job, before there is one that it could be mistaken to belong to."""
    try:
        for entry in list(workspace.iterdir()):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    except OSError as error:
        raise write_error(error, workspace.parent.parent) from error
