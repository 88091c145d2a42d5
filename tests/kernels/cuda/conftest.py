"""A CUDA device that the kernels support, and memory that is not zero by chance."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(scope="session")
def cuda() -> str:
    """The name of a CUDA device; skips where there is none, or none that the kernels support."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the kernels need compute capability 8.0")
    pytest.importorskip("cuda.core", reason="CUDA kernels need cuda-core")
    return "cuda:0"


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill what ``torch.empty`` returns: NaN in floats, the largest number in integers."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    filled, torch.utils.deterministic.fill_uninitialized_memory = (
        torch.utils.deterministic.fill_uninitialized_memory,
        True,
    )
    yield
    torch.utils.deterministic.fill_uninitialized_memory = filled
    torch.use_deterministic_algorithms(mode=was)


@pytest.fixture
def no_waiting() -> Callable[[], AbstractContextManager[None]]:
    """A context in which torch raises where the host would wait for the device."""

    @contextmanager
    def context() -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says, once, that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return context


@pytest.fixture
def kernel_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for compiled kernels, in the place of the user's own."""
    from espalier_format.kernels.cuda import compiler

    folder = tmp_path / "kernels"
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(folder))
    compiler._open_cache.cache_clear()
    yield folder
    compiler._open_cache.cache_clear()


@pytest.fixture(scope="session")
def module_tensors() -> Callable[..., tuple[Any, ...]]:
    """A function that brings (trellis, suh, svh) of a random module to a device."""

    def bring(module: Any, device: str) -> tuple[Any, ...]:
        return tuple(torch.from_numpy(array.copy()).to(device) for array in (module.trellis, module.suh, module.svh))

    return bring
