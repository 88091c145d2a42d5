"""The base installation is enough for everything but torch's own decoder, and loads only what it uses.

Optional packages are made unimportable in a fresh interpreter, as if they were not installed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BLOCKER = """
import sys

class Blocked:
    names = {names!r}
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ImportError("not installed: " + name)

sys.meta_path.insert(0, Blocked())
from espalier_format.cli import main

code = main(sys.argv[1:])
sys.stderr.write("".join("loaded " + name + chr(10) for name in sorted(sys.modules) if "." not in name))
sys.exit(code)
"""
OPTIONAL = ("torch", "numba", "transformers", "compressed_tensors", "huggingface_hub", "cuda", "model_signing")


def run_without(names: tuple[str, ...], *arguments: object) -> set[str]:
    """Run a command without some packages; return the top-level modules that were loaded."""
    result = subprocess.run(
        [sys.executable, "-c", BLOCKER.format(names=set(names)), *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return {line.removeprefix("loaded ") for line in result.stderr.splitlines() if line.startswith("loaded ")}


def test_every_command_without_optional_packages(llama_exl3: Path, tmp_path: Path) -> None:
    espalier, back, plain = tmp_path / "espalier", tmp_path / "exl3", tmp_path / "hf"
    for arguments in (
        ("convert", llama_exl3, espalier, "--to", "espalier", "--digests"),
        ("inspect", espalier),
        ("verify", espalier, "--deep"),
        ("convert", espalier, back, "--to", "exl3"),
        ("convert", espalier, plain, "--to", "hf", "--dtype", "bf16"),
        ("schema",),
        ("conformance", "--decoder", "espalier_format.conformance.adapters.numpy_adapter", "--only", "*/int6@4*"),
        ("demo",),
    ):
        assert not run_without(OPTIONAL, *arguments) & set(OPTIONAL), arguments


def test_compressed_tensors_are_read_without_optional_packages(fixtures: Path, tmp_path: Path) -> None:
    source = tmp_path / "packed"
    source.mkdir()
    samples = fixtures / "compressed-tensors"
    shutil.copy(samples / "w4a16_g128_asym.safetensors", source / "model.safetensors")
    weights = json.loads((samples / "manifest.json").read_text())["w4a16_g128_asym"]["weights"]
    group = {"targets": ["Linear"], "weights": weights}
    block = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    (source / "config.json").write_text(json.dumps({"quantization_config": block}))
    for arguments in (
        ("inspect", source),
        ("verify", source, "--deep"),
        ("convert", source, tmp_path / "hf", "--to", "hf"),
    ):
        assert not run_without(OPTIONAL, *arguments) & set(OPTIONAL), arguments


def test_blocking_works() -> None:
    """Otherwise the test above would show nothing."""
    with pytest.raises(AssertionError, match="not installed: numpy"):
        run_without(("numpy",), "demo")


WITHOUT_TORCH = """
import importlib, sys
sys.modules["torch"] = None
from espalier_format.errors import DependencyError

for name in ("torch_decoder", "torch_digest", "linear", "expert_bank", "ops"):
    try:
        importlib.import_module(f"espalier_format.kernels.{name}")
    except DependencyError as error:
        assert "pip install torch" in str(error), error
    else:
        raise AssertionError(name)
"""


def test_what_needs_torch_says_so() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True)


def test_inspect_loads_little(llama_exl3: Path) -> None:
    loaded = run_without((), "inspect", llama_exl3, "--json")
    assert not loaded & {*OPTIONAL, "rich", "safetensors", "asyncio", "importlib_metadata"}
    assert "rich" in run_without((), "inspect", llama_exl3)
