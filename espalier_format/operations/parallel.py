"""Run one function over many things in threads, with progress reported from the calling thread."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, TypeVar

from espalier_format.kernels.ordered_map import processors, submitted

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


def map_in_threads(
    work: Callable[[T, Callable[[int], object]], R], things: Iterable[T], progress: Progress
) -> Iterator[tuple[T, R]]:
    """Yield ``(thing, work(thing, report))`` in the order of ``things``, worked on by one thread per processor.

    ``work`` calls ``report(n_bytes)`` as it goes; the sum reaches ``progress.advance`` from the calling thread.
    An exception in ``work`` is raised here, after the threads have stopped.
    """
    counter = _Counter()
    threads = processors()

    def pair(thing: T) -> tuple[T, R]:
        return thing, work(thing, counter.add)

    pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="espalier-verify")
    try:
        for future in submitted(pool, pair, things, threads * _AHEAD - 1):
            yield _result(future, counter, progress)
    finally:
        pool.shutdown(cancel_futures=True)


def _result(future: Future[R], counter: _Counter, progress: Progress) -> R:
    """Wait for a result and report progress meanwhile."""
    while True:
        try:
            result = future.result(timeout=_POLL_SECONDS)
        except FutureTimeoutError:
            if future.done():  # the work itself ran into a timeout, on a network file system say
                raise
            progress.advance(counter.take())
        else:
            progress.advance(counter.take())
            return result
