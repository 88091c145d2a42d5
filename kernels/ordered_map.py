"""Work on items in a few threads, with the results in order and few of them waiting."""

from __future__ import annotations

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
    with ThreadPoolExecutor(threads) as pool:
        ahead: deque[Future[Result]] = deque()
        for item in todo:
            ahead.append(pool.submit(work, item))
            if len(ahead) > threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
