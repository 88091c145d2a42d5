"""Kernels compile for every architecture, on machines without a GPU too, and the result is kept.

What compiled code does is not checked here: that needs a GPU (`test_decode.py` and its neighbours).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from espalier_format.codec.codebook import get_codebook
from espalier_format.errors import DependencyError, UsageError
from espalier_format.kernels import cuda
from espalier_format.kernels.cuda import compiler
from espalier_format.kernels.cuda.compiler import ARCHITECTURES, Variant
from espalier_format.kernels.cuda.macros import codebook_macros

PER_KERNEL = 2
"""Variants of each kernel that the quick test compiles for each architecture; the slow one compiles all."""


def all_variants() -> dict[str, list[Variant]]:
    """The variants of every kernel, in the order that their modules give."""
    found: dict[str, list[Variant]] = {}
    for info in pkgutil.iter_modules(cuda.__path__):
        module = importlib.import_module(f"espalier_format.kernels.cuda.{info.name}")
        for variant in getattr(module, "variants", list)():
            found.setdefault(variant.kernel, []).append(variant)
    return found


VARIANTS = all_variants()

PAIRS = [
    (kernel, architecture)
    for kernel in sorted(VARIANTS)
    for architecture in ARCHITECTURES
    if architecture != "sm_90a" or kernel.endswith("_sm90")  # code for one architecture alone
]


@pytest.fixture
def needs_compiler() -> None:
    pytest.importorskip("cuda.core", reason="kernels are compiled by cuda-core, which is not installed")


def check(variant: Variant, architecture: str) -> str:
    """Compile and return what is wrong, if anything."""
    source = compiler.kernel_source(variant.kernel)
    try:
        cubin, remarks = compiler.compile_text(source, variant.kernel, variant.macros, architecture)
    except UsageError as error:
        return str(error)[:2000]
    if remarks:
        return remarks[:2000]
    missing = [symbol for symbol in variant.symbols if symbol.encode() + b"\0" not in cubin]
    return f"no {missing}" if missing or not cubin.startswith(b"\x7fELF") else ""


def test_every_kernel_has_variants() -> None:
    files = (resources.files("espalier_format.kernels") / "cuda").iterdir()
    assert sorted(VARIANTS) == sorted(file.name.removesuffix(".cu") for file in files if file.name.endswith(".cu"))


@pytest.mark.parametrize(("kernel", "architecture"), PAIRS)
def test_compiles(kernel: str, architecture: str, needs_compiler: None) -> None:
    """A few variants for each architecture, others for each, spread over all there are."""
    variants = VARIANTS[kernel]
    first, turns = ARCHITECTURES.index(architecture), len(ARCHITECTURES) * PER_KERNEL
    picked = {(first + len(ARCHITECTURES) * turn) * len(variants) // turns for turn in range(PER_KERNEL)}
    for index in sorted(picked):
        assert check(variants[index], architecture) == "", variants[index]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "architecture"), PAIRS)
def test_all_variants_compile(kernel: str, architecture: str, needs_compiler: None) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        faults = list(pool.map(lambda variant: check(variant, architecture), VARIANTS[kernel]))
    assert not [(variant, fault) for variant, fault in zip(VARIANTS[kernel], faults, strict=True) if fault]


@pytest.mark.parametrize(("macro", "less"), [("SHARED_BYTES", 32), ("ASSIGNMENTS", 1)])
def test_an_expert_bank_that_host_and_device_see_differently_does_not_compile(
    macro: str, less: int, needs_compiler: None
) -> None:
    variant = VARIANTS["expert_bank"][0]
    wrong = Variant(variant.kernel, variant.symbols, {**variant.macros, macro: int(variant.macros[macro]) - less})
    assert "static assertion failed" in check(wrong, "sm_90")


@pytest.mark.parametrize(("macro", "less"), [("SHARED_BYTES", 16), ("THREADS", 128)])
@pytest.mark.parametrize("turn", [0, -1])
def test_a_weight_kernel_that_host_and_device_see_differently_does_not_compile(
    macro: str, less: int, turn: int, needs_compiler: None
) -> None:
    variant = VARIANTS["decode_weight_sm90"][turn]
    wrong = Variant(variant.kernel, variant.symbols, {**variant.macros, macro: int(variant.macros[macro]) - less})
    assert "static assertion failed" in check(wrong, "sm_90a")


def test_headers_are_written_out_once() -> None:
    source = compiler.kernel_source("decode_weight")
    assert "#include" not in source
    assert source.count("struct Segment {") == 1
    assert source.count("GRID_CODES[4096]") == 1


def test_a_kernel_is_compiled_once(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch, needs_compiler: None) -> None:
    macros = codebook_macros(get_codebook("int5@3"))
    start = time.perf_counter()
    cubin = compiler.compile_cubin("decode_codes", macros, "sm_90")
    assert time.perf_counter() - start < 10
    assert kernel_cache.stat().st_mode & 0o077 == 0

    def refuse(*arguments: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler, "compile_text", refuse)
    compiler._open_cache.cache_clear()
    start = time.perf_counter()
    assert compiler.compile_cubin("decode_codes", dict(reversed(list(macros.items()))), "sm_90") == cubin
    assert time.perf_counter() - start < 0.2
    for other in ({**macros, "HALF_STEPS": 5}, {**macros, "MORE": 1}):
        with pytest.raises(AssertionError, match="compiled again"):
            compiler.compile_cubin("decode_codes", other, "sm_90")
    with pytest.raises(AssertionError, match="compiled again"):
        compiler.compile_cubin("decode_codes", macros, "sm_80")


def test_a_folder_that_others_can_write_to_is_not_used(
    kernel_cache: Path, needs_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    kernel_cache.mkdir()
    kernel_cache.chmod(0o770)
    for name in ("e2m1@1", "e2m1@2"):
        assert compiler.compile_cubin("decode_codes", codebook_macros(get_codebook(name)), "sm_90")
    assert not list(kernel_cache.iterdir())
    [message] = caplog.messages  # once in a process
    assert f"{kernel_cache} (others can write to it" in message


@pytest.mark.parametrize(("mode", "used"), [(0o777, False), (0o775, False), (0o1777, True), (0o755, True)])
def test_folders_above(
    mode: int, used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs_compiler: None, kernel_cache: Path
) -> None:
    """Who can write to a folder above can put another one in its place, unless it is sticky."""
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(mode)
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(above / "made" / "kernels"))
    assert (compiler._open_cache() is not None) is used
    assert (above / "made").stat().st_mode & 0o077 == 0


def test_what_is_kept_is_replaced(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch, needs_compiler: None) -> None:
    made = [b"first", b"second"]
    monkeypatch.setattr(compiler, "compile_text", lambda *arguments: (made.pop(0), ""))
    assert compiler.compile_cubin("decode_codes", {}, "sm_90") == b"first"
    assert compiler.compile_cubin("decode_codes", {}, "sm_90") == b"first"
    assert compiler.compile_cubin("decode_codes", {}, "sm_90", anew=True) == b"second"
    assert compiler.compile_cubin("decode_codes", {}, "sm_90") == b"second"


def test_the_key_covers_options_and_versions(monkeypatch: pytest.MonkeyPatch, needs_compiler: None) -> None:
    def key() -> bytes:
        return compiler._cache_key("text", "name", {}, "sm_90")

    first = key()
    assert key() == first
    assert any(found.startswith("espalier-format ") for found in compiler._versions())
    monkeypatch.setattr(compiler, "_OPTIONS", {**compiler._OPTIONS, "std": "c++20"})
    second = key()
    monkeypatch.setattr(compiler, "_versions", lambda: ("espalier-format 0.0.0",))
    assert len({first, second, key()}) == 3


def test_one_thread_at_a_time_imports(monkeypatch: pytest.MonkeyPatch, needs_compiler: None) -> None:
    """Any may be the first, and none finds a module half made. Filters of warnings, which are of all, change once."""
    entered: list[int] = []

    @contextlib.contextmanager
    def catch_warnings() -> Iterator[None]:
        entered.append(1)
        time.sleep(0.02)
        yield

    stub = SimpleNamespace(catch_warnings=catch_warnings, simplefilter=lambda action: None)
    monkeypatch.setattr(compiler, "warnings", stub)
    monkeypatch.setattr(compiler, "_imported", [])
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(lambda _: id(compiler.cuda_core()), range(8)))) == 1
    assert len(entered) == 1


@pytest.mark.parametrize("folder", ["{path}/file/below", "~nobody-has-this-name/kernels"])
def test_a_folder_that_cannot_be_made_is_done_without(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs_compiler: None, kernel_cache: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(compiler.CACHE_VARIABLE, folder.format(path=tmp_path))
    assert compiler.compile_cubin("decode_codes", codebook_macros(get_codebook("e2m1@1")), "sm_90")


def test_the_compilers_words_are_in_the_error(needs_compiler: None) -> None:
    with pytest.raises(UsageError, match="FAMILY"):
        compiler.compile_text('extern "C" __global__ void k() { FAMILY; }', "k", {}, "sm_90")


def test_without_cuda_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    monkeypatch.setattr(compiler, "_imported", [])
    with pytest.raises(DependencyError, match="cuda-core"):
        compiler.cuda_core()


def test_importing_needs_no_cuda_core() -> None:
    names = [f"espalier_format.kernels.cuda.{info.name}" for info in pkgutil.iter_modules(cuda.__path__)]
    code = f"import sys, {', '.join(names)}, espalier_format.kernels.ops; assert 'cuda.core' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
