"""The files of an output that are complete though the output is not, so that a later run need not write them again.

In the workspace of the output: `job.json`, `files/<hash of the name>.partial`, and `finished.jsonl` with one line for
each file that is complete and durable. What has no line, or other bytes than its line says, is written again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from espalier_format.container.atomic_file import replace_file
from espalier_format.container.durable import append_durably, sync_folder
from espalier_format.container.hashing import FileRecord, hash_file
from espalier_format.container.job import JOB_NAME, take_over
from espalier_format.container.json_document import parse_json
from espalier_format.container.ownership import is_sole_file
from espalier_format.container.regular_file import read_regular
from espalier_format.errors import EspalierError
from espalier_format.limits import MAX_JSON_BYTES

_FILES: Final = "files"
_JOURNAL: Final = "finished.jsonl"


class FinishedFiles:
    """What is finished of the job in `workspace`, which nobody else uses meanwhile; see the module.

    `add` may be called by another thread than the other methods.
    """

    def __init__(self, workspace: Path, job: Mapping[str, object]) -> None:
        """Take over what the workspace holds, or begin; remove what an earlier run did not finish.

        Raises:
            OutputExistsError, UsageError, WriteError: as `take_over`.
            OSError: the operating system refuses.
        """
        self._workspace = workspace
        self._files = workspace / _FILES
        self._journal = workspace / _JOURNAL
        self._lines: dict[str, tuple[str, str]] = {}
        if take_over(workspace, job, folders=[_FILES], files=[_JOURNAL]):
            self._read()
        self._files.mkdir(exist_ok=True)
        self._remove_others()

    def path(self, name: str) -> Path:
        """Return where the file that will be called `name` is to be written."""
        return self._files / f"{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}.partial"

    def find(self, name: str, plan: str, progress: Callable[[int], object] | None) -> FileRecord | None:
        """Return the record of a file that an earlier run finished by the same `plan`; its bytes are hashed.

        None for one that has to be written; a spoilt one has been removed then, and so has a link or one of several
        names of a file: in the output, it would change whenever somebody changes it elsewhere.

        Raises:
            OSError: a spoilt file cannot be removed.
        """
        line = self._lines.get(name)
        path = self.path(name)
        if line is None:
            return None
        if line[0] == plan and is_sole_file(path):
            with contextlib.suppress(EspalierError, OSError):
                record = hash_file(path, progress)
                if record.sha256 == line[1]:
                    return record
        del self._lines[name]
        path.unlink(missing_ok=True)
        return None

    def add(self, name: str, plan: str, record: FileRecord) -> None:
        """Remember, durably, that a file is complete and on disk; OSError when the operating system refuses."""
        line = json.dumps([name, plan, record.sha256]) + "\n"
        append_durably(self._journal, line.encode("ascii"))
        sync_folder(self._files)
        self._lines[name] = (plan, record.sha256)

    def leave(self, *, keep: bool) -> bool:
        """Remove what is not finished, or everything unless `keep`; return whether something is left. No OSError."""
        if not keep:
            self._lines.clear()
        self._remove_others()
        if self._lines:
            return True
        with contextlib.suppress(OSError):
            self._files.rmdir()
            self._journal.unlink(missing_ok=True)
            (self._workspace / JOB_NAME).unlink()
        return False

    def _remove_others(self) -> None:
        finished = {self.path(name) for name in self._lines}
        with contextlib.suppress(OSError):
            for path in list(self._files.iterdir()):
                if path not in finished:
                    path.unlink()

    def _read(self) -> None:
        if not self._journal.exists():
            return
        whole = 0
        data = read_regular(self._journal, MAX_JSON_BYTES)
        for line in data.splitlines(keepends=True):
            try:
                entry: Any = parse_json(line, path=self._journal)
                name, plan, sha256 = map(str, entry)
            except (EspalierError, TypeError, ValueError):
                break  # a kill cut the last line short
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            self._lines[name] = (plan, sha256)
        # Nothing may be appended to half a line, nor to a file that has another name elsewhere.
        if whole < len(data) or not is_sole_file(self._journal):
            replace_file(self._journal, data[:whole])
