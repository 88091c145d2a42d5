"""What a launch holds on to and asks for, with stubs in the place of the driver: needs no GPU."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from espalier_format.codec.codebook import get_codebook
from espalier_format.errors import UsageError

torch = pytest.importorskip("torch")
from espalier_format.kernels import matmul  # noqa: E402
from espalier_format.kernels.cuda import decode, launch, operands, workspace  # noqa: E402
from espalier_format.kernels.cuda.operands import aligned  # noqa: E402
from espalier_format.kernels.linear import LinearOperand  # noqa: E402

CODEBOOK = get_codebook("int5@3")


class Launches:
    """Looks, at the moment of a launch, whether the operands that it points to are there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies: list[tuple[weakref.ref[Any], Any]] = []
        self.count = 0

        def watched(tensor: Any) -> Any:
            copy = aligned(tensor)
            assert copy is not tensor
            self.copies.append((weakref.ref(copy), tensor))
            return copy

        monkeypatch.setattr(decode, "aligned", watched)
        monkeypatch.setattr(operands, "aligned", watched)
        monkeypatch.setattr(decode, "launch", self)

    def __call__(self, *arguments: Any, **options: Any) -> None:
        self.count += 1
        tensors: list[Any] = [reference() for reference, _ in self.copies]
        assert all(tensor is not None for tensor in tensors)
        pointers = [tensor.data_ptr() for tensor in tensors]
        assert len(set(pointers)) == len(pointers)
        assert set(pointers) <= set(arguments)
        assert all(torch.equal(tensor, original) for tensor, (_, original) in zip(tensors, self.copies, strict=True))


def odd(*shape: int, dtype: Any) -> Any:
    """A tensor at an address that is no multiple of 16."""
    size = int(np.prod(shape))
    return torch.arange(size + 1, dtype=torch.int16).view(dtype)[1:].view(shape)


def test_copies_of_the_trellis_live_until_codes_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)
    monkeypatch.setattr(decode, "_codes_kernel", lambda *arguments: None)
    decode.decode_codes(odd(8, 8, 48, dtype=torch.int16), CODEBOOK)
    assert (launches.count, len(launches.copies)) == (1, 1)


def test_copies_of_operands_live_until_a_weight_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)
    chosen = SimpleNamespace(
        kernel=None, threads=256, shared_bytes=0, resident_blocks=1, norm=np.float32(1), overlap=False
    )
    monkeypatch.setattr(decode, "_specialisation", lambda *arguments: chosen)
    trellis, suh, svh = odd(8, 8, 48, dtype=torch.int16), odd(128, dtype=torch.float16), odd(128, dtype=torch.float16)
    operand = LinearOperand(trellis, suh, svh, CODEBOOK, 128, 128, 128, 128)
    decode.decode_weight(operand, torch.float16, 0, 128)
    assert (launches.count, len(launches.copies)) == (1, 3)


@pytest.mark.parametrize("budget", [32, 1 << 20])
def test_decoded_then_multiplied(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one block of rows or several, with a bias of another dtype than the activations."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 128, generator=generator).bfloat16() for rows in (250, 70))
    bias = torch.randn(250, generator=generator)
    seen: list[slice] = []

    def decode_weight(*arguments: Any) -> Any:
        seen.append(slice(*arguments[-2:]))
        return weight[seen[-1]]

    monkeypatch.setattr(matmul, "GPU_BLOCK", budget * 128)
    monkeypatch.setattr(decode, "decode_weight", decode_weight)
    trellis, suh, svh = (torch.empty(shape, dtype=torch.int16) for shape in ((8, 16, 48), (128,), (256,)))
    scales = suh.view(torch.float16), svh.view(torch.float16)
    y = matmul._decode_then_multiply(x, LinearOperand(trellis, *scales, CODEBOOK, 128, 128, 128, 250, bias))
    torch.testing.assert_close(y, (x.float() @ weight.float().T + bias).bfloat16(), rtol=2**-7, atol=2**-7)
    assert seen == ([slice(0, 128), slice(128, 250)] if budget == 32 else [slice(0, 250)])


def test_shared_memory_never_gets_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads ask at once, and the one that needs less is held up on its way to the driver."""
    granted: list[int] = []
    small_has_begun, large_is_done = threading.Event(), threading.Event()

    def allow(kernel: Any, size: int, device_index: int) -> None:
        if size == 1 << 16:
            small_has_begun.set()
            large_is_done.wait(0.3)
        granted.append(size)
        if size == 1 << 17:
            large_is_done.set()

    monkeypatch.setattr(launch, "allow_shared_memory", allow)
    monkeypatch.setattr(launch, "_granted", {})
    kernel: Any = object()
    small = threading.Thread(target=launch._grant_shared_memory, args=(kernel, 1 << 16, 0))
    small.start()
    assert small_has_begun.wait(5)
    launch._grant_shared_memory(kernel, 1 << 17, 0)
    small.join()
    launch._grant_shared_memory(kernel, 1 << 16, 0)
    assert granted == [1 << 16, 1 << 17]


def test_a_kernel_with_a_grant_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grants go by its id, which another kernel could get; that one would be launched without a grant of its own."""

    class Kernel:
        pass

    monkeypatch.setattr(launch, "allow_shared_memory", lambda *arguments: None)
    monkeypatch.setattr(launch, "_granted", {})
    kernel: Any = Kernel()
    alive = weakref.ref(kernel)
    launch._grant_shared_memory(kernel, 1 << 16, 0)
    del kernel
    gc.collect()
    assert alive() is not None


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Counters in host memory; the current "stream" and "device", and the "capturing" device, -1 for none."""
    state = {"stream": 1, "device": 0, "capturing": -1}
    zeros = torch.zeros

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, state["device"] = state["device"], index
        yield
        state["device"] = before

    monkeypatch.setattr(torch, "zeros", lambda size, dtype, device: zeros(size, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state["device"])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"] == state["device"])
    monkeypatch.setattr(workspace, "current_raw_stream", lambda device_index: state["stream"])
    monkeypatch.setattr(workspace, "_MOST_KEPT", 2)
    workspace._sets.clear()
    yield state
    workspace._sets.clear()


def test_counters_in_use_are_kept(counters: dict[str, int]) -> None:
    """Of more streams than sets are kept for, the one used longest ago loses its own."""
    sets: dict[int, Any] = {}
    for stream in (1, 2, 1, 3, 1):
        counters["stream"] = stream
        sets.setdefault(stream, workspace.arrival_counters(0, 8))
        if stream == 1:
            assert workspace.arrival_counters(0, 8) is sets[1]
    counters["stream"] = 2
    assert workspace.arrival_counters(0, 8) is not sets[2]


def test_a_capture_has_counters_of_its_own(counters: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it lasts; with the next one on its stream they go, whatever became of the graph."""
    numbers = {1: 0, 2: 0}
    monkeypatch.setattr(workspace, "_capture", lambda device_index, stream: numbers[stream])
    monkeypatch.setattr(workspace, "_MOST_KEPT", 8)
    own = workspace.arrival_counters(0, 8)
    seen: list[weakref.ref[Any]] = []
    for number in (7, 8, 9):
        numbers.update({1: number, 2: number})
        first = workspace.arrival_counters(0, 8)
        counters["stream"] = 2
        branch = workspace.arrival_counters(0, 8)
        counters["stream"] = 1
        assert workspace.arrival_counters(0, 8) is first
        assert len({first.data_ptr(), branch.data_ptr(), own.data_ptr()}) == 3
        assert all(before() is None for before in seen)
        seen = [weakref.ref(first), weakref.ref(branch)]
        del first, branch
        numbers[1] = 0
        assert workspace.arrival_counters(0, 8) is own
    assert len(workspace._sets) == 3


def test_the_capture_is_that_of_the_device(counters: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the current device captures; and an error of the driver is one."""
    driver = pytest.importorskip("cuda.bindings.driver")
    answer = [driver.CUresult.CUDA_SUCCESS, 1, 7, None, [], [], 0]
    monkeypatch.setattr(driver, "cuStreamGetCaptureInfo", lambda stream: tuple(answer))
    counters["capturing"] = 1
    assert [workspace._capture(index, 1) for index in (0, 1)] == [0, 7]
    counters["capturing"] = 0
    assert [workspace._capture(index, 1) for index in (0, 1)] == [7, 0]
    answer[0] = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(UsageError, match="INVALID_VALUE"):
        workspace._capture(0, 1)
