"""Which devices torch can use here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier_format.errors import DependencyError, UsageError

if TYPE_CHECKING:
    import torch


def usable_device(name: str | torch.device) -> torch.device:
    """Return the device that torch knows by this name, after using it once.

    Raises:
        DependencyError: torch is not installed.
        UsageError: the name means nothing to torch, or there is no such device, or this torch cannot use it.
    """
    try:
        import torch  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise DependencyError("decoding to a device needs torch: pip install torch") from error
    try:
        device = torch.device(name)
        # A device may exist for torch and yet hold no numbers ("meta"), or have no code in this build of it.
        torch.zeros(1, device=device).item()
    except Exception as error:  # torch raises AssertionError, RuntimeError, ImportError and more, by device
        reason = str(error).strip().partition("\n")[0].rstrip(".")[:200]
        raise UsageError(f'device "{name}" is not available: {reason or type(error).__name__}') from error
    return device
