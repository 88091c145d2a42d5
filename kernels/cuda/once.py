"""Results that are made once, whichever thread asks first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")


def once(function: Callable[..., T]) -> Callable[..., T]:
    """Keep what a function returns for its positional, hashable arguments, for the life of the process.

    As `functools.cache`, but that calls the function in every thread that asks before there is a result, and keeps the
    last one: memory whose address a captured CUDA graph holds would be freed with the others. Here the other threads
    wait. What is raised is not kept.
    """
    kept: dict[tuple[Hashable, ...], T] = {}
    locks: dict[tuple[Hashable, ...], threading.Lock] = {}

    @wraps(function)
    def call(*arguments: Any) -> T:
        try:
            return kept[arguments]
        except KeyError:
            own = locks.setdefault(arguments, threading.Lock())  # one step, whatever other threads do
        with own:
            if arguments not in kept:
                kept[arguments] = function(*arguments)
            return kept[arguments]

    return call
