"""How long work reports its progress, whoever shows it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the progress of one job, in bytes, from the thread that called the job.

    A job calls ``start`` once, ``advance`` any number of times, ``finish`` once if it succeeds. The sum of
    all ``advance`` calls is then ``total_bytes``.
    """

    def start(self, total_bytes: int, label: str) -> None:
        """Begin: ``total_bytes`` will be processed; ``label`` names the job in one or two words."""

    def advance(self, n_bytes: int) -> None:
        """Report ``n_bytes`` more as done."""

    def finish(self) -> None:
        """End: everything is done."""


class NullProgress:
    """Shows nothing."""

    def start(self, total_bytes: int, label: str) -> None:
        """Ignore it."""

    def advance(self, n_bytes: int) -> None:
        """Ignore it."""

    def finish(self) -> None:
        """Ignore it."""
