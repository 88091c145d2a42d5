"""The rich console that reports for people are printed on."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from typing import TextIO

_MIN_WIDTH = 80  # on a narrower terminal lines wrap, which is better than figures cut short
_PIPE_WIDTH = 160  # columns where the output is no terminal: wide enough that no table of ours is ever folded


class ReportConsole(Console):
    """A console that leaves a closed pipe to the caller, where rich would end the process with exit code 1."""

    def on_broken_pipe(self) -> None:
        """Raise what happened."""
        raise BrokenPipeError


def open_console(stream: TextIO | None = None) -> ReportConsole:
    """Return a console on ``stream`` (stdout when None).

    It styles text for terminals only and honours NO_COLOR and TERM. Markup and emoji codes in text are not
    interpreted: text may come from files.
    """
    file = sys.stdout if stream is None else stream
    width = None if file.isatty() else _PIPE_WIDTH
    console = ReportConsole(file=file, width=width, highlight=False, emoji=False, markup=False)
    console.width = max(console.width, _MIN_WIDTH)
    return console
