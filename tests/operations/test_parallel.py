"""``map_in_threads``: order, progress, exceptions, bounded work in flight. That it is faster is for benchmarks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError

import pytest

from espalier_format.operations import parallel
from espalier_format.operations.parallel import map_in_threads


class Recorder:
    """A ``Progress`` that remembers, and knows which thread calls it."""

    def __init__(self) -> None:
        self.total = 0
        self.threads: set[int] = set()

    def start(self, total_bytes: int, label: str) -> None:
        pass

    def advance(self, n_bytes: int) -> None:
        self.total += n_bytes
        self.threads.add(threading.get_ident())

    def finish(self) -> None:
        pass


def square(number: int, report: Callable[[int], object]) -> int:
    report(number)
    return number * number


def test_order_and_progress() -> None:
    recorder = Recorder()
    assert list(map_in_threads(square, range(200), recorder)) == [(n, n * n) for n in range(200)]
    assert recorder.total == sum(range(200))
    assert recorder.threads == {threading.get_ident()}


def test_nothing_to_do() -> None:
    assert list(map_in_threads(square, [], Recorder())) == []


def test_progress_moves_while_one_thing_is_worked_on() -> None:
    recorder = Recorder()
    seen = threading.Event()

    def slow(_: int, report: Callable[[int], object]) -> bool:
        report(5)
        return seen.wait(30)

    def advance(n_bytes: int) -> None:
        if n_bytes:
            seen.set()

    recorder.advance = advance  # type: ignore[method-assign]
    assert list(map_in_threads(slow, [1], recorder)) == [(1, True)]


@pytest.mark.parametrize("error", [ValueError, FutureTimeoutError])
def test_exception_ends_it(error: type[Exception]) -> None:
    """Also the exception that the machinery itself uses to wait."""

    def work(number: int, report: Callable[[int], object]) -> int:
        if number == 3:
            raise error
        return square(number, report)

    results = map_in_threads(work, range(100), Recorder())
    assert [next(results)[1] for _ in range(3)] == [0, 1, 4]
    with pytest.raises(error):
        next(results)
    assert not any(thread.name.startswith("espalier-verify") for thread in threading.enumerate())


def test_bounded_work_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that nobody has taken yet are few, however many things there are."""
    monkeypatch.setattr(parallel, "processors", lambda: 2)
    taken = 0

    def things() -> object:
        nonlocal taken
        for number in range(1000):
            taken += 1
            yield number

    results = map_in_threads(square, things(), Recorder())  # type: ignore[arg-type]
    next(results)
    assert taken <= 8
    results.close()  # type: ignore[attr-defined]
