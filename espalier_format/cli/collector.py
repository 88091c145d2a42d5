"""Keeping the garbage collector out of the way of a short command."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the cyclic garbage collector from walking again and again over headers while they are read.

    A checkpoint of 90,000 tensors makes as many objects that stay and form no cycles; opening it takes half as long
    again with the collector on. It belongs to the whole process, so only the command line, which owns one, pauses it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
