"""Tensors on their way to a decoder and back: numpy arrays or torch tensors, bfloat16 included."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from espalier_format.codec.rounding import OutputDtype
from espalier_format.conformance.attempt import asked
from espalier_format.conformance.outcome import Mismatch
from espalier_format.errors import DependencyError, UsageError

if TYPE_CHECKING:
    import torch

_PATTERNS: Final[dict[str, np.dtype[Any]]] = {
    "float32": np.dtype(np.uint32),
    "float16": np.dtype(np.uint16),
    "bfloat16": np.dtype(np.uint16),
}


class Carrier:
    """Hands arrays to a decoder: as numpy arrays where ``device`` is None, else as torch tensors on that device.

    numpy has no bfloat16: there such arrays are uint16 bit patterns. A decoder gets copies, and must leave them as
    they are: a runtime needs its inputs again. Raises DependencyError where torch is not installed, UsageError for a
    device that torch does not have.
    """

    def __init__(self, device: str | None) -> None:
        self.device = device
        self.given: list[tuple[NDArray[Any] | torch.Tensor, tuple[object, ...]]] = []
        """What was handed out, and its content then; `changed` compares. To be cleared between cases."""
        if device is None:
            return
        try:
            import torch  # noqa: PLC0415 - only where it is asked for
        except ImportError as error:
            raise DependencyError("a decoder on a device needs torch: pip install torch") from error
        try:
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError) as error:
            line = str(error).partition("\n")[0]
            raise UsageError(f"torch cannot use the device {device!r}: {line}") from error

    def give(self, array: NDArray[Any]) -> NDArray[Any] | torch.Tensor:
        """Return an array in the decoder's form, with its dtype."""
        if self.device is None:
            return self._recorded(array.copy())
        import torch  # noqa: PLC0415 - as above

        return self._recorded(torch.from_numpy(array.copy()))

    def give_as(self, array: NDArray[np.float32], dtype: OutputDtype) -> NDArray[Any] | torch.Tensor:
        """Return float32 numbers in another dtype, in which they must be exact."""
        if self.device is not None:
            import torch  # noqa: PLC0415 - as above

            return self._recorded(torch.from_numpy(array.copy()).to(getattr(torch, dtype)))
        if dtype == "bfloat16":
            return self._recorded((array.view(np.uint32) >> np.uint32(16)).astype(np.uint16))
        return self._recorded(array.astype(dtype))

    def changed(self) -> Mismatch | None:
        """Return what is wrong if something that was handed out is no longer what it was."""
        for given, content in self.given:
            # What is left of a tensor whose storage is gone may raise.
            now = asked(lambda given=given: _content(given), None)  # type: ignore[misc] # bound at once
            if now != content:
                return Mismatch("changed its input: an array that it was given", expected="unchanged", got="changed")
        return None

    def _recorded(self, made: NDArray[Any] | torch.Tensor) -> NDArray[Any] | torch.Tensor:
        content = _content(made)  # before it is on a device: reading it back would wait
        if not isinstance(made, np.ndarray):
            made = made.to(self.device)
        self.given.append((made, content))
        return made

    def take(self, result: object) -> object:
        """Return a result where numpy can read it. Waits for the device, and raises what went wrong on it.

        What is no array, and cannot be one, is returned as it is.
        """
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(result, torch.Tensor):
            return result.detach().cpu()
        try:
            return np.asarray(result)
        except (TypeError, ValueError):
            if hasattr(result, "__array__"):
                raise
            return result

    def dtype(self, name: OutputDtype) -> str | torch.dtype:
        """Return a dtype in the decoder's form: its name, or torch's."""
        if self.device is None:
            return name
        import torch  # noqa: PLC0415 - as above

        dtype: torch.dtype = getattr(torch, name)
        return dtype


def _content(array: NDArray[Any] | torch.Tensor) -> tuple[object, ...]:
    if isinstance(array, np.ndarray):
        return array.shape, array.dtype, array.tobytes()
    import torch  # noqa: PLC0415 - there are torch tensors, so it is there

    # numpy has no bfloat16; bytes of a contiguous tensor are the same in any dtype.
    flat = array.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return tuple(array.shape), array.dtype, flat.numpy().tobytes()


def received(result: object) -> tuple[NDArray[Any], str]:
    """Return what a decoder gave back as a numpy array, and the name of its dtype; bfloat16 as uint16 patterns.

    Takes numpy arrays, those of the package ml_dtypes too, torch tensors on the CPU and what numpy takes for an array.
    Of anything else, it returns an array of objects and the name of its type.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(result, torch.Tensor):
        name = str(result.dtype).removeprefix("torch.")
        if result.dtype == torch.bfloat16:
            return result.view(torch.int16).numpy().view(np.uint16), name
        try:
            return result.numpy(), name
        except (TypeError, RuntimeError):  # a dtype or layout that numpy does not have
            return np.empty(0, object), name
    array = asked(lambda: np.asarray(result), None)
    if array is None:
        return np.empty(0, object), type(result).__name__
    if array.dtype.name == "bfloat16":
        return array.view(np.uint16), "bfloat16"
    return array, array.dtype.name


def received_floats(result: object, dtype: OutputDtype, shape: tuple[int, ...]) -> NDArray[Any] | Mismatch:
    """Return the bit patterns of numbers of a dtype, uint32 or uint16 of that shape, or what is wrong with them."""
    array, name = received(result)
    if dtype == "bfloat16" and name in ("uint16", "int16"):
        name = "bfloat16"
    if name != dtype:
        return Mismatch(f"the result has dtype {name}", expected=dtype, got=name)
    if array.shape != shape:
        return Mismatch(f"the result has shape {array.shape}", expected=str(shape), got=str(array.shape))
    patterns: NDArray[Any] = np.ascontiguousarray(array).view(_PATTERNS[dtype])
    return patterns


def numbers(patterns: NDArray[Any], dtype: OutputDtype) -> NDArray[np.float64]:
    """Return the numbers of bit patterns as float64."""
    if dtype == "bfloat16":
        return (patterns.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return patterns.view(dtype).astype(np.float64)
