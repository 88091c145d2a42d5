"""Progress on stderr: a bar on terminals, and a plain line now and then everywhere else."""

from __future__ import annotations

import sys
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from espalier_format.cli.quantities import duration, size
from espalier_format.cli.terminal import drop_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TextIO

    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from espalier_format.progress import Progress

SHORT_PAUSE: Final = 10.0
"""Seconds between two lines of a job in its first minutes; one that is done sooner prints none."""

LONG_PAUSE: Final = 60.0
"""Seconds between two lines of a job that takes long: a night is then some hundred lines of a log."""

_MARKS: Final = 4
"""The time left follows from the pace since so many lines ago."""

_LONG_JOB: Final = 600.0  # seconds after which a job takes long


class ProgressBar:
    """Shows one job at a time as a rich progress bar, with bytes, rate and time left."""

    def __init__(self, bar: RichProgress) -> None:
        self._bar = bar
        self._task: TaskID | None = None

    def start(self, total_bytes: int, label: str) -> None:
        """Show a new job, in place of the one before."""
        self._remove()
        self._task = self._bar.add_task(label, total=total_bytes)

    def advance(self, n_bytes: int) -> None:
        """Move the bar on."""
        if self._task is not None:
            self._bar.update(self._task, advance=n_bytes)

    def finish(self) -> None:
        """Take the bar away; the report that follows says what was done."""
        self._remove()

    def _remove(self) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None


class ProgressLines:
    """Writes a plain line about the job to a log or a pipe every now and then, and nothing about a short one.

    ``pause`` is the time in seconds between two lines, from the start on; later in a long job it is `LONG_PAUSE`, if
    that is longer. A stream that cannot be written to any more costs the lines, not the work. ``clock`` gives seconds.
    """

    def __init__(
        self, stream: TextIO, *, pause: float = SHORT_PAUSE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._pause = pause
        self._clock = clock
        self._label = ""
        self._total = self._done = 0
        self._started = self._shown = 0.0
        self._marks: deque[tuple[float, int]] = deque(maxlen=_MARKS)
        self._open = True

    def start(self, total_bytes: int, label: str) -> None:
        """Begin with a new job."""
        self._label, self._total, self._done = label, total_bytes, 0
        self._started = self._shown = self._clock()
        self._marks.clear()
        self._marks.append((self._started, 0))

    def advance(self, n_bytes: int) -> None:
        """Count on, and write a line if it is time for one."""
        self._done += n_bytes
        now = self._clock()
        elapsed = now - self._started
        pause = self._pause if elapsed < _LONG_JOB else max(self._pause, LONG_PAUSE)
        if self._open and now - self._shown >= pause:
            self._shown = now
            self._write(self._line(now))
            self._marks.append((now, self._done))

    def finish(self) -> None:
        """Write nothing; the report that follows says what was done."""

    def _line(self, now: float) -> str:
        done, total = self._done, self._total
        percent = 100 * done // total if total else 100
        line = f"{self._label}: {percent} %, {size(done)} of {size(total)}, {duration(now - self._started)} so far"
        # As if the rest went at the pace since a line before the last: what was there already may have gone faster.
        since, before = self._marks[0]
        if done == before:
            return line
        return f"{line}, about {duration((now - since) * max(total - done, 0) / (done - before))} left"

    def _write(self, line: str) -> None:
        try:
            self._stream.write(f"{line}\n")
            self._stream.flush()
        except (OSError, ValueError):  # nobody reads it any more, the disk of the log is full, or it was closed
            self._open = False
            drop_stream(self._stream)


@contextmanager
def open_progress() -> Iterator[Progress]:
    """Yield a progress bar if stderr is a terminal, else lines for a log; both say nothing on stdout."""
    if not sys.stderr.isatty():
        yield ProgressLines(sys.stderr)
        return
    from rich import progress as rich_progress  # noqa: PLC0415 - only where there is a terminal

    from espalier_format.cli.console import open_console  # noqa: PLC0415

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    # Streams are not redirected: with --json the document on stdout must stay exactly as it was printed.
    with rich_progress.Progress(
        *columns,
        console=open_console(sys.stderr),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        yield ProgressBar(bar)
