"""Counters that kernels find zero and leave zero, safe with streams and CUDA graphs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final, NamedTuple

import torch

from espalier_format.errors import UsageError
from espalier_format.kernels.cuda.launch import current_raw_stream

_LEAST: Final = 4096
_MOST_KEPT: Final = 256


class _Place(NamedTuple):
    """Whose counters they are: a stream's own, or those of what it captures."""

    device_index: int
    stream: int
    captured: bool


class _Set(NamedTuple):
    capture: int
    counters: torch.Tensor


_sets: Final[OrderedDict[_Place, _Set]] = OrderedDict()
_lock: Final = threading.Lock()


def arrival_counters(device_index: int, size: int) -> torch.Tensor:
    """Return at least ``size`` int32 counters, zero, for kernels on the current stream that leave them zero.

    Kernels of one stream follow each other and share them; another stream has its own. A capture has its own as well,
    one set for each of its streams, made by a node of the graph, which zeroes it in every replay. Waits for nothing;
    allocates at the first call only, and for a larger size. Raises UsageError when the driver cannot tell of a capture.

    **Who else gets the memory of a set.** Here it is kept until a larger one is needed, until its stream takes part in
    another capture, or until `_MOST_KEPT` others have been used since. Whenever it goes, torch's allocator gives it
    only to what comes later on the same stream; that of a capture only to what is captured into the same pool: later
    on the same stream of the graph itself, or in a graph that shares its pool. Graphs with pools of their own, which
    is how torch makes them, thus never share counters and may be replayed at once, whatever their number. Those that
    share a pool must not, says torch, as their results lie in the same memory too; one after the other they may, since
    each zeroes its counters. A capture that does not go through torch (``torch.cuda.graph``) has no pool, and neither
    its counters nor its results are safe.
    """
    stream = current_raw_stream(device_index)
    capture = _capture(device_index, stream)
    place = _Place(device_index, stream, captured=capture != 0)
    with _lock:
        # A stream stays in a capture until that ends: another number means that the earlier one has.
        kept = _sets.get(place)
        if kept is None or kept.capture != capture or kept.counters.shape[0] < size:
            zeros = torch.zeros(max(size, _LEAST), dtype=torch.int32, device=torch.device("cuda", device_index))
            kept = _sets[place] = _Set(capture, zeros)
        _sets.move_to_end(place)
        if len(_sets) > _MOST_KEPT:
            _sets.popitem(last=False)
    return kept.counters


def _capture(device_index: int, stream: int) -> int:
    """Return the number of the capture that the current stream of a device takes part in, 0 for none."""
    if device_index == torch.cuda.current_device():
        capturing = torch.cuda.is_current_stream_capturing()
    else:
        with torch.cuda.device(device_index):  # torch only tells of the current device's stream
            capturing = torch.cuda.is_current_stream_capturing()
    if not capturing:
        return 0
    from cuda.bindings import driver  # noqa: PLC0415 - an optional dependency

    error, _, number, *_ = driver.cuStreamGetCaptureInfo(stream)
    if int(error) != 0:
        raise UsageError(f"the CUDA driver does not tell which capture a stream takes part in: {error.name}")
    return int(number)
