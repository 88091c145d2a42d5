"""Kernels on a device: compiled, loaded, and ready to be launched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from espalier_format.errors import UsageError
from espalier_format.kernels.cuda.compiler import compile_cubin, cuda_core

if TYPE_CHECKING:
    from cuda.core import Kernel

LOWEST_CAPABILITY: Final = (8, 0)
"""The first compute capability that has all instructions used here (mma on float16, cp.async)."""


class Preparation(NamedTuple):
    """Something that the first launch of a kind does and keeps: compile, load, bring a table to the device."""

    call: Callable[..., object]
    arguments: tuple[Hashable, ...]


_lock: Final = threading.Lock()
_locks: Final[dict[tuple[object, ...], threading.Lock]] = {}
"""One for each specialisation of a file: who comes second, also for another device, finds the compiled code on disk."""


def load_kernel(
    name: str, symbol: str, macros: Mapping[str, int | str], device_index: int, *, specific: bool = False
) -> Kernel:
    """Return the function ``symbol`` of ``<name>.cu``, specialised by the macros, ready to launch on a CUDA device.

    With ``specific`` its code has instructions that only the device's own architecture has ("sm_90a").

    Compiled at the first use (or taken from disk, see `compiler.compile_cubin`) and kept for the life of the process.
    Everything that a launch would do lazily is done here, so that a kernel loaded before is safe to launch while a
    stream is being captured; loading itself during a capture works too. Safe to call from several threads: a kernel is
    loaded once, and different ones at the same time, each by a thread that asks for it.

    A damaged copy on disk is replaced. Raises DependencyError where cuda-core is missing, and UsageError for a device
    that is too old and for code that the driver refuses.
    """
    return _load(name, symbol, tuple(sorted(macros.items())), device_index, specific)


@lru_cache(maxsize=32)
def architecture(device_index: int) -> str:
    """Return the architecture that a device needs code for: "sm_90".

    Raises UsageError for a compute capability below 8.0.
    """
    import torch  # noqa: PLC0415 - an optional dependency

    capability = torch.cuda.get_device_capability(device_index)
    if capability < LOWEST_CAPABILITY:
        raise UsageError(
            f"cuda:{device_index} is too old for these kernels",
            expected="compute capability 8.0 or newer",
            got=".".join(map(str, capability)),
        )
    return "sm_{}{}".format(*capability)


@lru_cache(maxsize=32)
def reserved_shared_memory(device_index: int) -> int:
    """Return how many bytes of a thread block's shared memory are the driver's: its own begins behind them.

    Raises DependencyError where cuda-core is missing.
    """
    return int(cuda_core().Device(device_index).properties.reserved_shared_memory_per_block)


def _load(
    name: str, symbol: str, macros: tuple[tuple[str, int | str], ...], device_index: int, specific: bool
) -> Kernel:
    with _lock:
        own = _locks.setdefault((name, macros, specific), threading.Lock())
    with own:
        return _load_once(name, symbol, macros, device_index, specific)


@cache
def _load_once(
    name: str, symbol: str, macros: tuple[tuple[str, int | str], ...], device_index: int, specific: bool
) -> Kernel:
    core = cuda_core()
    target = architecture(device_index) + "a" * specific
    code = compile_cubin(name, dict(macros), target)
    with _relaxed_capture(), _on_device(device_index):
        try:
            return _load_code(core, code, name, symbol)
        except Exception as error:  # cuda-core has its own errors
            # What was kept on disk may be damaged. If it is not, or was not from there, the result is the same.
            again = compile_cubin(name, dict(macros), target, anew=True)
            if again == code:
                raise _refused(name, error) from error
        try:
            return _load_code(core, again, name, symbol)
        except Exception as error:
            raise _refused(name, error) from error


def _load_code(core: Any, code: bytes, name: str, symbol: str) -> Kernel:
    kernel: Kernel = core.ObjectCode.from_cubin(code, name=name).get_kernel(symbol)
    _load_eagerly(kernel)
    return kernel


def _refused(name: str, error: Exception) -> UsageError:
    return UsageError(f"{name}.cu cannot be loaded: {error}")


@contextmanager
def _on_device(device_index: int) -> Iterator[None]:
    import torch  # noqa: PLC0415 - an optional dependency

    with torch.cuda.device(device_index):
        torch.cuda.current_stream()  # torch is initialised
        bind_context(device_index)
        yield


def bind_context(device_index: int) -> None:
    """Make the device's primary context, which is torch's, current in this thread.

    A new thread has none until its first call of the CUDA runtime; launches go through the driver.
    """
    cuda_core().Device(device_index).set_current()


@contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Let this thread load code even while it captures a stream, which only looks unsafe to the driver."""
    from cuda.bindings import driver  # noqa: PLC0415 - an optional dependency

    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    error, previous = driver.cuThreadExchangeStreamCaptureMode(mode)
    _checked(error)
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(previous)


def _load_eagerly(kernel: Kernel) -> None:
    """Bring the code to the device now: with lazy loading, the driver's default, the first launch would."""
    from cuda.bindings import driver  # noqa: PLC0415 - an optional dependency

    error, function = driver.cuKernelGetFunction(raw_handle(kernel))
    _checked(error)
    _checked(driver.cuFuncLoad(function)[0])


def allow_shared_memory(kernel: Kernel, size: int, device_index: int) -> None:
    """Let a kernel use that many bytes of dynamic shared memory, which needs asking for above 48 KiB.

    Raises UsageError when the device has less.
    """
    from cuda.bindings import driver  # noqa: PLC0415 - an optional dependency

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (error,) = driver.cuKernelSetAttribute(attribute, size, raw_handle(kernel), driver.CUdevice(device_index))
    if error != driver.CUresult.CUDA_SUCCESS:
        raise UsageError(f"cuda:{device_index} has less shared memory than the kernel needs", expected=size, got=error)


def raw_handle(kernel: Kernel) -> Any:
    """Return the driver's handle of a kernel."""
    return kernel.handle


def _checked(error: Any) -> None:
    if int(error) != 0:
        raise UsageError(f"the CUDA driver refuses to load a kernel: {error.name}")
