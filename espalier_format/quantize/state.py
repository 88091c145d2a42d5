"""What a quantization has come to so far, on disk, so that it can go on after an interruption at any moment.

The folder holds ``job.json`` (what decides about the result), ``measurements.jsonl`` (one line per module) and
``results/<number>.safetensors`` (trellis, suh and svh of one module). Each result gets its name when it is
complete and durable; what a kill left under a temporary name is removed at the start of the next run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from espalier_format.container.atomic_file import replace_file
from espalier_format.container.durable import append_durably, sync_folder, write_error
from espalier_format.container.header import serialise_header
from espalier_format.container.job import JOB_NAME, take_over
from espalier_format.container.json_document import parse_json
from espalier_format.container.names import SHARD_SUFFIX
from espalier_format.container.regular_file import read_regular
from espalier_format.container.shard import Shard
from espalier_format.errors import EspalierError, WriteError
from espalier_format.limits import MAX_JSON_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from espalier_format.encoder.options import EncodedModule

_MEASUREMENTS: Final = "measurements.jsonl"
_RESULTS: Final = "results"
_SECONDS_PER_SYNC: Final = 10.0
_HASH: Final = "sha256"
TENSORS: Final = ("trellis", "suh", "svh")


@dataclass(frozen=True, slots=True)
class ModuleResult:
    """A finished module: where its tensors are, and what its report says."""

    path: Path
    codebook: str
    digest: str
    report: Mapping[str, Any]

    def chunks(self, tensor: str) -> Iterator[bytes]:
        """Yield the bytes of ``trellis``, ``suh`` or ``svh``."""
        with Shard(self.path) as shard:
            info = shard.header.tensors[tensor]
            yield from shard.chunks(info.start, info.end)


class QuantizeState:
    """The state of one job in ``folder``, which nobody else uses meanwhile; see the module."""

    def __init__(self, folder: Path, job: Mapping[str, object]) -> None:
        """Take over what the folder holds, or begin.

        Raises:
            OutputExistsError, UsageError, WriteError: as `take_over`.
        """
        self._folder = folder
        self._results = folder / _RESULTS
        self._lines: list[str] = []
        self._synced = time.monotonic()
        self.measurements: dict[str, tuple[float, ...]] = {}
        if take_over(folder, job, folders=[_RESULTS], files=[_MEASUREMENTS]):
            self._read_measurements()
        self._durable = bool(self.measurements)
        with _write_errors(folder):
            self._results.mkdir(exist_ok=True)
            for entry in self._results.iterdir():
                if entry.suffix != SHARD_SUFFIX:
                    entry.unlink()

    def add_measurement(self, module: str, errors: Sequence[float]) -> None:
        """Remember the measured errors of a module's candidates. They are durable after `flush`, or in ten seconds."""
        self.measurements[module] = tuple(errors)
        self._lines.append(json.dumps([module, list(errors)]) + "\n")
        if time.monotonic() - self._synced > _SECONDS_PER_SYNC:
            self.flush()

    def flush(self) -> None:
        """Make all measurements durable; WriteError when the operating system refuses."""
        if not self._lines:
            return
        with _write_errors(self._folder):
            append_durably(self._folder / _MEASUREMENTS, "".join(self._lines).encode("ascii"))
        self._durable = True
        self._lines.clear()
        self._synced = time.monotonic()

    def leave(self) -> None:
        """Make durable what is not yet, where that is possible; remove the job where there is nothing to go on with."""
        with contextlib.suppress(WriteError):
            self.flush()
        if self._durable or any(self._results.glob(f"*{SHARD_SUFFIX}")):
            return
        with contextlib.suppress(OSError):
            (self._folder / _MEASUREMENTS).unlink(missing_ok=True)
            self._results.rmdir()
            (self._folder / JOB_NAME).unlink()

    def result(self, number: int, module: str, codebook: str) -> ModuleResult | None:
        """Return the result of a module if it is there and whole: its bytes are hashed. Else None."""
        path = self._path(number)
        if path.is_symlink() or not path.exists():
            return None
        try:
            with Shard(path) as shard:
                notes = dict(shard.header.metadata)
                whole = shard.header.tensors.keys() == set(TENSORS)
                whole = whole and notes.pop(_HASH, None) == _hash(notes, shard.chunks(0, _data_size(shard)))
            report = parse_json(notes.get("report", "").encode("utf-8", "surrogatepass"), path=path)
        except EspalierError:
            return None
        if not whole or (notes.get("module"), notes.get("codebook")) != (module, codebook):
            return None
        if "digest" not in notes or not isinstance(report, dict):
            return None
        return ModuleResult(path, codebook, notes["digest"], report)

    def add_result(
        self, number: int, module: str, encoded: EncodedModule, digest: str, report: Mapping[str, object]
    ) -> ModuleResult:
        """Store a finished module durably and return it.

        Raises:
            WriteError: the operating system refuses; earlier results stay.
        """
        arrays = {
            "trellis": np.ascontiguousarray(encoded.trellis, "<i2"),
            "suh": np.ascontiguousarray(encoded.suh, "<f2"),
            "svh": np.ascontiguousarray(encoded.svh, "<f2"),
        }
        notes = {
            "module": module,
            "codebook": encoded.codebook.name,
            "digest": digest,
            "report": json.dumps(report),
        }
        notes[_HASH] = _hash(notes, (array.data for array in arrays.values()))
        kinds = {"trellis": "I16", "suh": "F16", "svh": "F16"}
        header = serialise_header([(name, kinds[name], array.shape) for name, array in arrays.items()], notes)
        path = self._path(number)
        temporary = path.with_suffix(".partial")
        with _write_errors(self._folder, temporary):
            with temporary.open("wb") as file:
                file.write(header)
                for array in arrays.values():
                    file.write(array.data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(self._results)
        return ModuleResult(path, encoded.codebook.name, digest, dict(report))

    def _path(self, number: int) -> Path:
        return self._results / f"{number:06d}{SHARD_SUFFIX}"

    def _read_measurements(self) -> None:
        path = self._folder / _MEASUREMENTS
        if not path.exists():
            return
        whole: list[bytes] = []
        for line in read_regular(path, MAX_JSON_BYTES).splitlines(keepends=True):
            try:
                entry: Any = parse_json(line, path=path)
                self.measurements[str(entry[0])] = tuple(float(number) for number in entry[1])
            except (EspalierError, TypeError, ValueError, LookupError, OverflowError):
                break  # a kill cut the last line short
            if not line.endswith(b"\n"):
                break
            whole.append(line)
        # Nothing may be appended to half a line.
        replace_file(path, b"".join(whole))


def _data_size(shard: Shard) -> int:
    return shard.header.file_size - shard.header.data_start


def _hash(notes: Mapping[str, str], chunks: Iterable[bytes | memoryview]) -> str:
    """Return the SHA-256 of what is noted of a result and of its tensors."""
    found = hashlib.sha256(json.dumps(notes, sort_keys=True).encode("ascii"))
    for chunk in chunks:
        found.update(chunk)
    return found.hexdigest()


@contextlib.contextmanager
def _write_errors(folder: Path, temporary: Path | None = None) -> Iterator[None]:
    """Turn an OSError into a WriteError, and remove the temporary file; the writer says in the end what is kept."""
    try:
        yield
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
        raise write_error(error, folder.parent.parent, kept=True) from error
