"""Printing that is safe for terminals, pipes and programs: text from files, errors, warnings, JSON documents."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import TextIO

JSON_SCHEMA_VERSION = 1
"""The version of every document that ``--json`` prints; it rises when a key changes its meaning or goes away."""

_POOR_ENCODING = "espalier-plain"  # name of an error handler
_PLAIN = {"–": "-", "…": "...", "×": "x", "█": "#", "▏": "|"}


def safe_text(text: str) -> str:
    r"""Return ``text`` with everything that could act on a terminal spelled out (``\x1b``, ``\u202e``).

    Names and messages come from files. Control characters, bidirectional overrides, line separators and lone
    surrogates are escaped; printable text of any language is unchanged.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def use_safe_streams() -> None:
    """Make stdout and stderr replace or escape what their encoding lacks, not raise, and exist even if closed."""
    # Python gives None for a descriptor that was closed before it started (`2>&-`).
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - till the end
    sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - till the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_POOR_ENCODING)


def drop_stream(stream: TextIO) -> None:
    """Give what is left in the buffer of a stream somewhere to go: the interpreter flushes it once more at exit."""
    # pytest and other hosts replace the streams by objects without a descriptor: nothing is flushed there.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _replace_own(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace the characters that reports are drawn with, and escape all others."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    known = "".join(_PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode("ascii") for c in lacking)
    return known, error.end


codecs.register_error(_POOR_ENCODING, _replace_own)


def print_json(document: Mapping[str, object]) -> None:
    """Print one JSON document on stdout, ASCII only, ``schema_version`` first."""
    print(json.dumps({"schema_version": JSON_SCHEMA_VERSION, **document}, indent=2, allow_nan=False))  # noqa: T201


def print_error(code: str, message: str) -> None:
    """Print ``error[code]: message`` as one line on stderr."""
    print(f"error[{code}]: {safe_text(' '.join(message.split()))}", file=sys.stderr)  # noqa: T201


def print_traceback(error: BaseException) -> None:
    """Print the traceback of an error on stderr, as safe for terminals as everything else."""
    import traceback  # noqa: PLC0415 - for --debug only

    for line in "".join(traceback.format_exception(error)).splitlines():
        print(safe_text(line), file=sys.stderr)  # noqa: T201


def print_warnings(warnings: Iterable[str]) -> None:
    """Print each warning as one line on stderr."""
    for warning in warnings:
        print(f"warning: {safe_text(' '.join(warning.split()))}", file=sys.stderr)  # noqa: T201
