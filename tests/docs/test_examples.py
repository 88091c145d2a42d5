"""The examples of docs/library.md, of the README and of docstrings do what they say.

The README's block uses a placeholder for a folder, which is put in. Links from docs/ are checked to lead somewhere.
"""

from __future__ import annotations

import doctest
import re
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import espalier_format
from espalier_format.codec.rotation import BLOCKS
from espalier_format.encoder.effort import EFFORTS
from espalier_format.operations.convert import convert_checkpoint
from espalier_format.quantize.recipe import _COMPONENTS, _RULE_KEYS

ROOT = Path(__file__).resolve().parent.parent.parent
LIBRARY = ROOT / "docs" / "library.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MODULES = (
    "espalier_format.checkpoint.opening",
    "espalier_format.codec.codebook",
    "espalier_format.kernels.digest",
    "espalier_format.kernels.numpy_decoder",
    "espalier_format.kernels.reference",
    "espalier_format.operations.convert",
    "espalier_format.operations.inspect",
    "espalier_format.operations.verify",
    "espalier_format.planning.bank",
    "espalier_format.planning.config_plan",
    "espalier_format.planning.module",
    "espalier_format.read_only",
)
"""Modules with documented functions, each of which has an example."""


def run(text: str, names: dict[str, Any], name: str) -> int:
    """Run the examples in a text; return how many there are. What differs is in the message of the failure."""
    test = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    reports: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(test, out=reports.append, clear_globs=False)
    names.update(test.globs)
    assert not reports, "".join(reports)
    return len(test.examples)


def test_the_page_about_the_library() -> None:
    names: dict[str, Any] = {}
    blocks = BLOCK.findall(LIBRARY.read_text(encoding="utf-8"))
    try:
        assert sum(run(block, names, f"{LIBRARY.name}, block {number}") for number, block in enumerate(blocks, 1)) > 40
    finally:
        shutil.rmtree(names["folder"].parent)


def test_a_wrong_example_is_found() -> None:
    with pytest.raises(AssertionError, match="Expected"):
        run(">>> 1 + 1\n3\n", {}, "wrong")


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str) -> None:
    module = import_module(name)
    tests = [test for test in doctest.DocTestFinder(recurse=True).find(module) if test.examples]
    assert tests, "an example is missing"
    for test in tests:
        assert test.docstring is not None
        run(test.docstring, dict(test.globs), test.name)


def test_the_readme(llama_exl3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert_checkpoint(llama_exl3, tmp_path / "espalier", to="espalier")
    blocks = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert blocks
    for block in blocks:
        assert "DIR-espalier" in block
        exec(compile(block.replace("DIR-espalier", str(tmp_path / "espalier")), "README.md", "exec"), {})
    assert "model.layers.0.self_attn.q_proj exl3-mcg@3 512 512" in capsys.readouterr().out


def test_the_page_names_what_there_is() -> None:
    text = LIBRARY.read_text(encoding="utf-8")
    assert {"plan", "open_checkpoint", "decode_weight"} < set(espalier_format.__all__)
    for name in espalier_format.__all__:
        assert name in text or name.startswith("__") or name in _TYPES, name
    stable = text.partition("## What is stable")[2].partition("\n## ")[0]
    for row in re.findall(r"^\| (`.*?) \|", stable, re.MULTILINE):
        first = ""
        for name in re.findall(r"`([a-z_.]+)`", row):
            if name == "__all__":
                continue
            full = name if name.startswith("espalier_format") else first.rpartition(".")[0] + name
            import_module(full)
            first = full


_TYPES = {"Checkpoint", "Codebook", "ExpertBankView", "Manifest", "Plan", "QuantizationConfig", "QuantizedModule"}
"""What the functions on the page take and return."""


def test_the_page_names_every_key_and_effort() -> None:
    section = LIBRARY.read_text(encoding="utf-8").partition("\n## Quantize")[2].partition("\n## ")[0]
    efforts, _, recipe = section.partition("**Which modules**")
    assert set(re.findall(r'^\| `"(\w+)"`', efforts, re.MULTILINE)) == set(EFFORTS)
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", recipe, re.MULTILINE))
    assert set(rows) == _RULE_KEYS
    assert set(_COMPONENTS) <= set(re.findall("`([a-z-]+)`", rows["component"]))
    assert ", ".join(map(str, BLOCKS[:-1])) in rows["rotation"]


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), target
