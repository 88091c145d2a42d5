"""Whether there is a GPU to decode on."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_DRIVER: Final = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/nvmap"))
"""What the driver shows on Linux, under WSL, and on Jetson boards."""


def decoding_device() -> str | None:
    """Return "cuda" where torch can decode on a GPU, else None.

    torch is imported only where a driver is present: importing it takes seconds.
    """
    if not any(path.exists() for path in _DRIVER):
        return None
    try:
        import torch  # noqa: PLC0415 - an optional dependency
    except ImportError:
        return None
    return "cuda" if torch.cuda.is_available() else None
