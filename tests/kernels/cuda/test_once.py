"""Results that are made once."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from espalier_format.kernels.cuda.once import once


def test_threads_that_ask_at_once_get_the_same_result() -> None:
    started = threading.Barrier(4)

    @once
    def make(number: int) -> object:
        calls.append(number)
        time.sleep(0.05)
        return object()

    def ask(number: int) -> object:
        started.wait(timeout=10)
        return make(number)

    calls: list[int] = []
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(ask, [1, 1, 1, 2]))
    assert results[0] is results[1] is results[2] is make(1)
    assert results[3] is make(2) is not results[0]
    assert sorted(calls) == [1, 2]


def test_what_is_raised_is_not_kept() -> None:
    answers = iter([ValueError("no"), None])

    @once
    def make() -> str:
        if error := next(answers):
            raise error
        return "yes"

    with pytest.raises(ValueError, match="no"):
        make()
    assert make() == make() == "yes"
