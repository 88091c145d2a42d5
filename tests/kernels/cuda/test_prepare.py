"""What is compiled ahead is what launches ask for, with stubs in the place of loader and driver: needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from espalier_format.codec.codebook import get_codebook
from espalier_format.errors import UsageError

torch = pytest.importorskip("torch")
from espalier_format.kernels.cuda import compiler, decode, expert_bank, loading, matmul  # noqa: E402
from espalier_format.kernels.matmul import fused_rows  # noqa: E402
from espalier_format.kernels.ops import ExpertBankOperand, LinearOperand, linear, prepare  # noqa: E402

DEVICE = 3
NAMES = ("gate_proj", "up_proj", "down_proj")
CACHES = (matmul._kernels, matmul.device_limits, decode._specialisation)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is loaded, one entry a time, for a device like an H200 that is not there."""
    found: list[Any] = []

    def load_kernel(name: str, symbol: str, macros: Any, device: int, *, specific: bool = False) -> Any:
        found.append((name, symbol, tuple(sorted(macros.items())), device, specific))
        return symbol

    properties = SimpleNamespace(
        multi_processor_count=132, shared_memory_per_block_optin=227 << 10, shared_memory_per_multiprocessor=228 << 10
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: DEVICE)
    monkeypatch.setattr(decode, "reserved_shared_memory", lambda index: 1024)
    for module in (matmul, decode, expert_bank):
        monkeypatch.setattr(module, "load_kernel", load_kernel)
    for module in (matmul, decode):
        monkeypatch.setattr(module, "launch", lambda *arguments, **options: None)
    monkeypatch.setattr(matmul, "arrival_counters", lambda index, size: torch.zeros(size, dtype=torch.int32))
    monkeypatch.setattr("espalier_format.kernels.prepare.usable_device", torch.device)
    for cached in CACHES:
        cached.cache_clear()
    yield found
    for cached in CACHES:
        cached.cache_clear()


def operand_of(name: str, inputs: int, outputs: int, device: str = "cpu") -> LinearOperand:
    book = get_codebook(name)
    shapes = ((inputs // 16, outputs // 16, book.halfwords_per_tile), (inputs,), (outputs,))
    trellis, suh, svh = (torch.zeros(shape, dtype=torch.int16, device=device) for shape in shapes)
    scales = suh.view(torch.float16), svh.view(torch.float16)
    return LinearOperand(trellis, *scales, book, 128, 128, inputs, outputs)


def multiply(operand: LinearOperand, rows: int) -> None:
    x = torch.zeros((rows, operand.in_features), dtype=torch.float16)
    matmul.launch_matmul(x, operand, x.new_empty((rows, operand.out_features)))


@pytest.mark.parametrize("name", ["e2m1@1.5", "int6@4", "exl3-mul1@3"])
def test_products_of_up_to_so_many_rows(name: str, loaded: list[Any]) -> None:
    """Nothing more is loaded for any of them; one row more than the kernel takes needs the decoder."""
    operand = operand_of(name, 1024, 512)
    fused = fused_rows(1024 * 512)
    for rows in (1, 9, fused):
        assert prepare([operand, operand], "float16", rows=rows, device=f"cuda:{DEVICE}")
        before = list(loaded)
        assert {kernel[0] for kernel in before} == {"matmul"}
        for count in range(1, rows + 1):
            multiply(operand, count)
        assert loaded == before
    prepare([operand], "float16", rows=fused + 1, device=f"cuda:{DEVICE}")
    before = list(loaded)
    assert before[-1][0].startswith("decode_weight")
    decode.decode_weight(operand, torch.float16, 0, 512)
    assert loaded == before
    assert len(set(before)) == len(before)


def test_any_number_of_rows_and_other_devices(loaded: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel once, whatever the number of operands that need it."""
    operands = [operand_of("int5@3", 1024, outputs, "meta") for outputs in (512, 512, 1024)]
    count = prepare(operands, torch.bfloat16, device=f"cuda:{DEVICE}")
    files = [kernel[0] for kernel in loaded]
    assert files.count("decode_weight_sm90") == 1
    assert files.count("matmul") == 2 * (count - 1)  # two functions
    assert {kernel[3] for kernel in loaded} == {DEVICE}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE)
    assert prepare(operands, torch.bfloat16, device="cuda") == count
    assert [kernel[0] for kernel in loaded] == files


@pytest.mark.parametrize(
    ("rows", "device", "message"),
    [
        (0, None, "rows"),
        (2.5, None, "rows"),
        (True, None, "rows"),
        (1, "nonsense", "device"),
        (1, "cuda:977", "device"),
    ],
)
def test_arguments_that_mean_nothing(rows: Any, device: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prepare([operand_of("e2m1@2", 128, 128)], "float16", rows=rows, device=device)


def bank_of(*experts: Any) -> ExpertBankOperand:
    return ExpertBankOperand.from_experts(
        {name: list(experts) for name in NAMES}, hidden=64, intermediate=64, rotations=dict.fromkeys(NAMES, (32, 32))
    )


def expert(name: str) -> Any:
    scales = torch.ones(64, dtype=torch.float16)
    return torch.zeros(4, 4, get_codebook(name).halfwords_per_tile, dtype=torch.int16), scales, scales, name


def test_banks(loaded: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(expert_bank, "_specialisation", lambda *arguments: asked.append(arguments))
    bank = bank_of(expert("e2m1@2"), expert("int5@3"))
    assert prepare([bank, bank], "bf16", device=f"cuda:{DEVICE}") == 1
    assert asked == [(bank.layout.spelling, True, DEVICE)]


@pytest.mark.gpu
def test_nothing_is_compiled_after_it(cuda: str, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cached in (*CACHES, loading._load_once):
        cached.cache_clear()
    operand = operand_of("int5@2.5", 256, 256, cuda)
    assert prepare([operand], "float16", rows=40) > 1
    assert list(kernel_cache.iterdir())

    def refuse(*arguments: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler, "compile_text", refuse)
    for rows in (1, 9, fused_rows(256 * 256), 40):
        y = linear(torch.ones((rows, 256), dtype=torch.float16, device=cuda), operand)
        assert not y.any()  # scales of zero


def test_what_needs_no_kernel(loaded: list[Any]) -> None:
    operand = operand_of("int5@3", 1024, 512)
    assert prepare([operand], "float16") == 0
    assert prepare([operand], "float32", device=f"cuda:{DEVICE}") == 0
    assert prepare([bank_of(expert("e2m1@2"), torch.zeros(64, 64))], "float16", device=f"cuda:{DEVICE}") == 0
    assert prepare([], "float16", device=f"cuda:{DEVICE}") == 0
    assert loaded == []


def test_what_is_refused(loaded: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    operand = operand_of("int5@3", 1024, 512)
    with pytest.raises(UsageError, match="rows"):
        prepare([operand], "float16", rows=0, device=f"cuda:{DEVICE}")
    with pytest.raises(UsageError, match="no such output dtype"):
        prepare([operand], torch.float64, device=f"cuda:{DEVICE}")

    def too_old(*arguments: Any, **options: Any) -> None:
        raise UsageError("cuda:3 is too old")

    monkeypatch.setattr(matmul, "load_kernel", too_old)
    with pytest.raises(UsageError, match="too old"):
        prepare([operand], "float16", rows=1, device=f"cuda:{DEVICE}")
