"""Counters that kernels find zero and leave zero, safe with streams and CUDA graphs."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import torch

from espalier_format.kernels.cuda.launch import current_raw_stream

_LEAST: Final = 4096
_MOST_KEPT: Final = 256

_counters: OrderedDict[tuple[int, int, int], torch.Tensor] = OrderedDict()


def arrival_counters(device_index: int, size: int) -> torch.Tensor:
    """Return at least ``size`` int32 counters, zero, for kernels on the current stream that leave them zero.

    Kernels of one stream follow each other and share them; another stream has its own. While a stream is being captured
    there is one set for each graph, made by a node of the graph: zeroed when a replay starts, never shared with another
    graph or with work outside. Waits for nothing; allocates at the first call only.
    """
    stream = current_raw_stream(device_index)
    key = (device_index, stream, _capture(stream))
    counters = _counters.get(key)
    if counters is None or counters.shape[0] < size:
        counters = torch.zeros(max(size, _LEAST), dtype=torch.int32, device=torch.device("cuda", device_index))
        _counters[key] = counters
        if len(_counters) > _MOST_KEPT:
            _counters.popitem(last=False)
    return counters


def _capture(stream: int) -> int:
    """Return the number of the capture that a stream takes part in, 0 for none."""
    if not torch.cuda.is_current_stream_capturing():
        return 0
    from cuda.bindings import driver  # noqa: PLC0415 - an optional dependency

    return int(driver.cuStreamGetCaptureInfo(stream)[2])
