"""Run one function over many things in threads, with progress reported from the calling thread."""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from espalier_format.progress import Progress

T = TypeVar("T")
R = TypeVar("R")

_POLL_SECONDS = 0.1
_AHEAD = 4  # things queued per thread: enough to keep threads busy, few enough to bound memory


class _Counter:
    """Bytes that threads have done and the calling thread has not yet reported."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0

    def add(self, n_bytes: int) -> None:
        with self._lock:
            self._bytes += n_bytes

    def take(self) -> int:
        with self._lock:
            taken, self._bytes = self._bytes, 0
        return taken


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_threads(
    work: Callable[[T, Callable[[int], object]], R], things: Iterable[T], progress: Progress
) -> Iterator[tuple[T, R]]:
    """Yield ``(thing, work(thing, report))`` in the order of ``things``, worked on by one thread per processor.

    ``work`` calls ``report(n_bytes)`` as it goes; the sum reaches ``progress.advance`` from the calling thread.
    An exception in ``work`` is raised here, after the threads have stopped.
    """
    counter = _Counter()
    threads = processors()
    queued: deque[tuple[T, Future[R]]] = deque()
    pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="espalier-verify")
    try:
        for thing in things:
            queued.append((thing, pool.submit(work, thing, counter.add)))
            if len(queued) >= threads * _AHEAD:
                yield _next(queued, counter, progress)
        while queued:
            yield _next(queued, counter, progress)
    finally:
        pool.shutdown(cancel_futures=True)


def _next(queued: deque[tuple[T, Future[R]]], counter: _Counter, progress: Progress) -> tuple[T, R]:
    thing, future = queued.popleft()
    while True:
        try:
            result = future.result(timeout=_POLL_SECONDS)
        except FutureTimeoutError:
            if future.done():  # the work itself ran into a timeout, on a network file system say
                raise
            progress.advance(counter.take())
        else:
            progress.advance(counter.take())
            return thing, result
