"""Runs the kit in a process of its own, so that a decoder that ends its process does not end the command with it."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from espalier_format import errors
from espalier_format.conformance.attempt import described
from espalier_format.conformance.report import ConformanceReport
from espalier_format.conformance.suite import Options
from espalier_format.errors import EspalierError, UsageError

# No `-m`: the other process shall find modules where this one does.
_START: Final = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from espalier_format.conformance.apart import work; work(sys.argv[1], int(sys.argv[2]))"
)
_REQUEST: Final = "request"
_ANSWER: Final = "answer"
_INTERRUPTED: Final = "interrupted"


@dataclass(frozen=True, slots=True)
class Request:
    """What to run: the arguments of `load_decoders` and `run_conformance`."""

    decoders: tuple[str, ...]
    kind: str | None
    level: int | None
    device: str | None
    options: Options


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error on its way to the other process: of a class of this package, whatever a foreign one derives from it."""

    kind: str
    message: str
    path: str | None
    tensor: str | None
    expected: str | None
    got: str | None
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        trace = "".join(traceback.format_exception(error))
        if not isinstance(error, EspalierError):
            return cls("", described(error), None, None, None, None, trace)
        kind = next(base.__name__ for base in type(error).__mro__ if base.__module__ == errors.__name__)
        expected, got = (None if value is None else str(value) for value in (error.expected, error.got))
        return cls(kind, str(error.message), error.path, error.tensor, expected, got, trace)

    def error(self) -> Exception:
        made: Exception
        if self.kind:
            kind: type[EspalierError] = getattr(errors, self.kind)
            made = kind(self.message, path=self.path, tensor=self.tensor, expected=self.expected, got=self.got)
        else:
            made = RuntimeError(self.message)
        made.add_note(f"in the process of the decoder:\n{self.trace}")
        return made


def run_apart(request: Request) -> ConformanceReport:
    """Load the decoders and run the kit in another process; what they print goes to stderr.

    Only that the answer is there, whole, counts: ``os._exit(0)`` in a decoder is a failure, and so is a crash. If this
    process is killed the other one ends too, and takes the temporary files with it.

    Raises:
        UsageError: the process ended before the kit was through.
        EspalierError: as `load_decoders` and `run_conformance`.
    """
    with tempfile.TemporaryDirectory(prefix="espalier-conformance-") as folder:
        Path(folder, _REQUEST).write_bytes(pickle.dumps(request))
        reading, writing = os.pipe()  # this process has the end that closes when it is gone
        command = [sys.executable, "-c", _START, folder, str(reading), *sys.path]
        try:
            status = subprocess.run(command, check=False, pass_fds=[reading]).returncode  # noqa: S603 - our own text
        finally:
            os.close(reading)
            os.close(writing)
        answer = Path(folder, _ANSWER)
        if not answer.is_file():
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            raise UsageError("a decoder ended its process before the kit was through", got=how)
        result = pickle.loads(answer.read_bytes())  # noqa: S301 - from our own process, in a folder of our own
    if result == _INTERRUPTED:
        raise KeyboardInterrupt
    if isinstance(result, _Failure):
        raise result.error()
    assert isinstance(result, ConformanceReport)
    return result


def work(folder: str, parent: int) -> None:
    """Do what the folder says, and leave the answer there; the other end of `run_apart`.

    ``parent`` is a pipe whose other end the parent holds.
    """
    tempfile.tempdir = folder  # which is removed, however this process ends
    threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()
    request: Request = pickle.loads(Path(folder, _REQUEST).read_bytes())  # noqa: S301 - as above
    answer: ConformanceReport | _Failure | str
    try:
        answer = _run(request)
    except KeyboardInterrupt:
        answer = _INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the other process reports it
        answer = _Failure.of(error)
    # Renamed when it is whole: half an answer is none.
    part = Path(folder, f"{_ANSWER}.part")
    part.write_bytes(pickle.dumps(answer))
    part.replace(Path(folder, _ANSWER))


def _end_with(parent: int, folder: str) -> None:
    os.read(parent, 1)  # nothing is written: it returns when the parent is gone
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _run(request: Request) -> ConformanceReport:
    from espalier_format.conformance.loading import load_decoders, see_current_folder  # noqa: PLC0415
    from espalier_format.conformance.runner import run_conformance  # noqa: PLC0415

    see_current_folder()
    with redirect_stdout(sys.stderr):  # what foreign code prints is no part of the report
        decoders, names = load_decoders(request.decoders, request.kind)
        return run_conformance(
            decoders, options=request.options, device=request.device, claim=request.level, names=names
        )
