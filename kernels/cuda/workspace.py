"""Counters that kernels find zero and leave zero, safe with streams and CUDA graphs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

import torch

from espalier_format.errors import UsageError
from espalier_format.kernels.cuda.launch import current_raw_stream

_LEAST: Final = 4096
_MOST_KEPT: Final = 256

_counters: Final[OrderedDict[tuple[int, int, int], torch.Tensor]] = OrderedDict()
_lock: Final = threading.Lock()


def arrival_counters(device_index: int, size: int) -> torch.Tensor:
    """Return at least ``size`` int32 counters, zero, for kernels on the current stream that leave them zero.

    Kernels of one stream follow each other and share them; another stream has its own. While a stream is being captured
    there is one set for each graph, made by a node of the graph: zeroed when a replay starts, never shared with another
    graph or with work outside. Waits for nothing; allocates at the first call only, and for a larger size. Of the sets,
    the ones used last are kept. Raises UsageError when the driver cannot tell of a capture.
    """
    stream = current_raw_stream(device_index)
    key = (device_index, stream, _capture(device_index, stream))
    with _lock:
        counters = _counters.get(key)
        if counters is None or counters.shape[0] < size:
            counters = torch.zeros(max(size, _LEAST), dtype=torch.int32, device=torch.device("cuda", device_index))
            _counters[key] = counters
        _counters.move_to_end(key)  # the set that goes is the one used longest ago, not one that is in use
        if len(_counters) > _MOST_KEPT:
            _counters.popitem(last=False)
    return counters


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
