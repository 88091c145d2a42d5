"""Launch a kernel on torch's current stream."""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import torch

from espalier_format.kernels.cuda.compiler import cuda_core
from espalier_format.kernels.cuda.loading import allow_shared_memory, bind_context

if TYPE_CHECKING:
    from cuda.core import Kernel, LaunchConfig, Stream

_thread = threading.local()


def launch(
    kernel: Kernel,
    device_index: int,
    grid: tuple[int, int, int],
    block: int,
    shared_bytes: int,
    *arguments: Any,
    overlap: bool = False,
) -> None:
    """Launch a kernel on the current stream of a device, without waiting for anything.

    ``grid`` counts thread blocks, ``block`` the threads of each (in one dimension); ``shared_bytes`` is dynamic
    shared memory and may exceed 48 KiB. Of the arguments, a plain int is a pointer; a scalar is a numpy or ctypes
    scalar of the parameter's type. With ``overlap`` the kernel may start before the one before it in the stream has
    ended, and waits itself before it reads or writes (``overlap.cuh``; compute capability 9.0 and above). Safe from any
    thread, and while the stream is being captured if `loading.load_kernel` came before.

    Raises UsageError when the device has too little shared memory. An error of a kernel that ran shows later, at
    the next synchronisation, as with every CUDA operation.
    """
    if shared_bytes > 48 << 10:
        _grant_shared_memory(kernel, shared_bytes, device_index)
    if device_index != torch.cuda.current_device():
        with torch.cuda.device(device_index):
            _launch(kernel, device_index, _config(grid, block, shared_bytes, overlap), arguments)
    else:
        _launch(kernel, device_index, _config(grid, block, shared_bytes, overlap), arguments)


def _launch(kernel: Kernel, device_index: int, config: LaunchConfig, arguments: tuple[Any, ...]) -> None:
    if not getattr(_thread, "bound", False):
        bind_context(device_index)  # later changes of device go through torch, which binds
        _thread.bound = True
    _core_launch()(_stream(current_raw_stream(device_index)), config, kernel, *arguments)


@lru_cache(maxsize=1)
def _core_launch() -> Any:
    return cuda_core().launch


# Private, but what torch's own compiler generates calls to; the public way costs a microsecond more.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001


def current_raw_stream(device_index: int) -> int:
    """Return the handle of torch's current stream on a device."""
    if _raw_stream is not None:
        return int(_raw_stream(device_index))
    return int(torch.cuda.current_stream(device_index).cuda_stream)


@lru_cache(maxsize=256)
def _stream(handle: int) -> Stream:
    stream: Stream = cuda_core().Stream.from_handle(handle)
    return stream


@lru_cache(maxsize=4096)
def _config(grid: tuple[int, int, int], block: int, shared_bytes: int, overlap: bool) -> LaunchConfig:
    core = cuda_core()
    options: dict[str, Any] = {}
    if overlap and hasattr(core.LaunchConfig, "programmatic_stream_serialization"):  # an older cuda-core has not
        options["programmatic_stream_serialization"] = True
    config: LaunchConfig = core.LaunchConfig(grid=grid, block=block, shmem_size=shared_bytes, **options)
    return config


_granted: Final[dict[tuple[int, int], tuple[int, Kernel]]] = {}
_grant_lock: Final = threading.Lock()


def _grant_shared_memory(kernel: Kernel, size: int, device_index: int) -> None:
    """Ask for shared memory once for each kernel, device and larger size; what is granted never gets less."""
    key = (id(kernel), device_index)
    if _granted.get(key, (0, kernel))[0] >= size:
        return
    # The driver keeps the size that was set last: of two threads, the one that needs less must not come second.
    with _grant_lock:
        if _granted.get(key, (0, kernel))[0] < size:
            allow_shared_memory(kernel, size, device_index)
            _granted[key] = size, kernel  # kept, so that no other kernel ever has this id
