"""A progress bar on stderr, for terminals only."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from espalier_format.progress import NullProgress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from espalier_format.progress import Progress


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


@contextmanager
def open_progress() -> Iterator[Progress]:
    """Yield a progress bar if stderr is a terminal, else one that shows nothing."""
    if not sys.stderr.isatty():
        yield NullProgress()
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
