"""What can be known of loading and of the decoding kernels' shape without a GPU."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from espalier_format.codec.codebook import CODEBOOKS
from espalier_format.codec.rotation import BLOCKS
from espalier_format.errors import UsageError

torch = pytest.importorskip("torch")
from espalier_format.kernels.cuda import decode, loading  # noqa: E402


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """A function that makes torch believe in a device of that compute capability."""
    loading.architecture.cache_clear()

    def pretend(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (major, minor))

    return pretend


@pytest.mark.parametrize(("major", "minor", "name"), [(8, 0, "sm_80"), (9, 0, "sm_90"), (10, 0, "sm_100")])
def test_architecture(major: int, minor: int, name: str, capability: Callable[[int, int], None]) -> None:
    capability(major, minor)
    assert loading.architecture(0) == name


def test_an_old_device_is_refused(capability: Callable[[int, int], None]) -> None:
    capability(7, 5)
    with pytest.raises(UsageError, match=r"8\.0"):
        loading.architecture(0)


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What stands in for compiler and driver: the code "kept", the code "made" and the code that is "loaded"."""
    state: dict[str, Any] = {"kept": b"damaged", "made": b"good", "compiled": 0}

    def compile_cubin(*arguments: Any, anew: bool = False) -> bytes:
        if anew:
            state["compiled"] += 1
            state["kept"] = state["made"]
        return bytes(state["kept"])

    def load_code(core: Any, cubin: bytes, name: str, symbol: str) -> bytes:
        if cubin != b"good":
            raise RuntimeError("CUDA_ERROR_INVALID_IMAGE")
        return cubin

    monkeypatch.setattr(loading, "compile_cubin", compile_cubin)
    monkeypatch.setattr(loading, "_load_code", load_code)
    monkeypatch.setattr(loading, "cuda_core", lambda: None)
    monkeypatch.setattr(loading, "architecture", lambda device_index: "sm_90")
    monkeypatch.setattr(loading, "_relaxed_capture", contextlib.nullcontext)
    monkeypatch.setattr(loading, "_on_device", contextlib.nullcontext)
    loading._load_once.cache_clear()
    yield state
    loading._load_once.cache_clear()


def test_a_damaged_copy_is_compiled_again(code: dict[str, Any]) -> None:
    loaded: Any = loading.load_kernel("k", "k", {}, 0)
    assert loaded == b"good"
    assert code["compiled"] == 1


def test_code_that_the_driver_refuses(code: dict[str, Any]) -> None:
    """Compiled again once, never more, whether or not the result is another one."""
    for made in (b"damaged", b"damaged otherwise"):
        code.update(kept=b"damaged", made=made, compiled=0)
        with pytest.raises(UsageError, match="CUDA_ERROR_INVALID_IMAGE"):
            loading.load_kernel("k", "k", {}, 0)
        assert code["compiled"] == 1


def test_different_kernels_are_compiled_at_once(code: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files, and one file with other macros."""
    together = threading.Barrier(3, timeout=5)

    def compile_cubin(*arguments: Any, anew: bool = False) -> bytes:
        together.wait()
        return b"good"

    monkeypatch.setattr(loading, "compile_cubin", compile_cubin)
    with ThreadPoolExecutor(3) as pool:
        kernels = [
            pool.submit(loading.load_kernel, *each, 0)
            for each in (("k", "k", {}), ("m", "m", {}), ("k", "k", {"A": 1}))
        ]
        assert [kernel.result() for kernel in kernels] == [b"good"] * 3


def test_the_same_kernel_is_compiled_once(code: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another function of the file is asked for, or another device: they find the code on disk."""
    inside: list[int] = []
    most: list[int] = []
    loaded: list[str] = []

    def compile_cubin(*arguments: Any, anew: bool = False) -> bytes:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()
        return b"good"

    def load_code(core: Any, cubin: bytes, name: str, symbol: str) -> bytes:
        loaded.append(symbol)
        return cubin

    monkeypatch.setattr(loading, "compile_cubin", compile_cubin)
    monkeypatch.setattr(loading, "_load_code", load_code)
    asked = [("a", 0), ("b", 0), ("a", 1), ("a", 0), ("b", 0)]
    with ThreadPoolExecutor(len(asked)) as pool:
        list(pool.map(lambda each: loading.load_kernel("k", each[0], {}, each[1]), asked))
    assert max(most) == 1
    assert sorted(loaded) == ["a", "a", "b"]


@pytest.mark.parametrize("multiprocessor", [100 << 10, 164 << 10, 228 << 10])
@pytest.mark.parametrize("name", CODEBOOKS)
def test_shared_memory(name: str, multiprocessor: int) -> None:
    """There is a form of the weight kernel for every codebook and rotation that fits, as often as it says."""
    for rotation_in in BLOCKS:
        for rotation_out in BLOCKS:
            macros, size = decode.weight_macros(
                CODEBOOKS[name], rotation_in, rotation_out, False, multiprocessor - 1024, multiprocessor
            )
            assert int(macros["RESIDENT"]) * (size + 1024) <= multiprocessor
            if multiprocessor == 228 << 10 and 256 not in (rotation_in, rotation_out):
                assert (macros["STAGED"], int(macros["RESIDENT"]) >= 2) == (1, True)


@pytest.mark.parametrize("name", CODEBOOKS)
def test_shared_memory_of_warpgroups(name: str) -> None:
    """227 KiB are what a thread block may have on compute capability 9.0."""
    for rotation_in in BLOCKS:
        macros = decode.warpgroup_macros(CODEBOOKS[name], rotation_in, 128, bfloat16=False)
        assert int(macros["SHARED_BYTES"]) <= 227 << 10
        assert int(macros["THREADS"]) <= 1024


@pytest.mark.parametrize(
    ("name", "rotation", "device", "reserved", "takes"),
    [
        ("e2m1@2", (128, 128), (9, 0), 1024, True),
        ("exl3-mcg@3", (0, 64), (9, 0), 1024, True),
        ("int8@5", (128, 128), (9, 0), 1024, False),
        ("e2m1@2", (128, 256), (9, 0), 1024, False),
        ("e2m1@2", (256, 128), (9, 0), 1024, False),
        ("e2m1@2", (128, 128), (8, 9), 1024, False),
        ("e2m1@2", (128, 128), (10, 0), 1024, False),
        ("e2m1@2", (128, 128), (9, 0), 0, False),  # a driver that keeps less would have the kernel trap
        ("e2m1@2", (128, 128), (9, 0), 2048, False),
    ],
)
def test_who_takes_warpgroups(
    name: str,
    rotation: tuple[int, int],
    device: tuple[int, int],
    reserved: int,
    takes: bool,
    capability: Callable[[int, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capability(*device)
    monkeypatch.setattr(decode, "reserved_shared_memory", lambda index: reserved)
    assert decode.takes_warpgroups(CODEBOOKS[name], *rotation, 0) == takes
