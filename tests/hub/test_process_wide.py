"""What signing and uploading change of the process is as before afterwards, also where two threads do it at once."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from espalier_format.hub import commits, signing
from espalier_format.hub.client import HubClient
from espalier_format.hub.library import are_progress_bars_disabled, get_session


def state() -> list[Any]:
    """Everything that one of the two changes."""
    return [
        sys.stdout,
        warnings.filters,
        warnings.showwarning,
        are_progress_bars_disabled(),
        list(get_session().event_hooks["response"]),
        [list(handler.filters) for handler in logging.getLogger("huggingface_hub").handlers],
    ]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda _client: signing._quiet(), id="signing"),
        pytest.param(commits._supervised, id="uploading"),
    ],
)
def test_two_threads_leave_the_process_as_it_was(
    change: Callable[[HubClient], AbstractContextManager[Any]], client: HubClient
) -> None:
    before = state()
    second_is_in, first_is_out = threading.Event(), threading.Event()

    def second() -> None:
        with change(client):
            second_is_in.set()
            first_is_out.wait(10)

    thread = threading.Thread(target=second)
    with change(client):
        thread.start()
        assert not second_is_in.wait(0.3)
    first_is_out.set()
    thread.join(10)
    assert second_is_in.is_set()
    assert state() == before
