"""Work on items in a few threads, with the results in order and few of them waiting."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from espalier_format.errors import UsageError

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(work: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """Yield ``work(item)`` for each item, in order; at most ``threads`` + 1 of them are ahead.

    With one thread nothing is ahead and the caller's thread does the work. An exception of ``work`` is raised in its
    place, and items not begun are dropped. Raises UsageError for fewer threads than 1.
    """
    if threads < 1:
        raise UsageError("threads must be at least 1", got=threads)
    todo: Sequence[Item] = list(items)
    if threads == 1 or len(todo) < 2:
        yield from map(work, todo)
        return
    pool = ThreadPoolExecutor(threads)
    try:
        for future in submitted(pool, work, todo, threads):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def submitted(
    pool: ThreadPoolExecutor, work: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Iterator[Future[Result]]:
    """Submit ``work`` for each item and yield the futures in order; at most ``ahead`` + 1 are not yet yielded."""
    queued: deque[Future[Result]] = deque()
    for item in items:
        queued.append(pool.submit(work, item))
        if len(queued) > ahead:
            yield queued.popleft()
    while queued:
        yield queued.popleft()


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
