"""The rich console that reports for people are printed on."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.segment import Segment, Segments

if TYPE_CHECKING:
    from typing import TextIO

    from rich.table import Table

_MIN_WIDTH = 80  # on a narrower terminal lines wrap, which is better than figures cut short
_PIPE_WIDTH = 160  # columns where the output is no terminal: wide enough that no table of ours is ever folded


class ReportConsole(Console):
    """A console that leaves a closed pipe to the caller, where rich would end the process with exit code 1."""

    def on_broken_pipe(self) -> None:
        """Raise what happened."""
        raise BrokenPipeError


def open_console(stream: TextIO | None = None) -> ReportConsole:
    """Return a console on ``stream`` (stdout when None).

    It styles text for terminals only, and with NO_COLOR or TERM=dumb not at all, neither in colour nor in bold. Markup
    and emoji codes in text are not interpreted: text may come from files.
    """
    file = sys.stdout if stream is None else stream
    width = None if file.isatty() else _PIPE_WIDTH
    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    console = ReportConsole(file=file, width=width, color_system=colours, highlight=False, emoji=False, markup=False)
    console.width = max(console.width, _MIN_WIDTH)
    return console


def print_table(console: Console, table: Table) -> None:
    """Print a table without the blanks that rich fills lines with."""
    segments: list[Segment] = []
    for line in console.render_lines(table, pad=False):
        while line and not line[-1].text.strip():
            line.pop()
        segments += line[:-1]
        segments += [Segment(part.text.rstrip(), part.style) for part in line[-1:]]
        segments.append(Segment.line())
    console.print(Segments(segments), end="")
