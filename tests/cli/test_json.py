"""The documents of ``--json``: one on stdout whatever happens, and keys that programs may rely on.

Adding a key means adding it here; taking one away or changing its meaning means raising ``schema_version``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import espalier_draft

Run = Callable[..., Any]

NUMBERS = ["modules", "tensors", "weights", "bits", "bits_with_scales", "code_bytes", "scale_bytes", "bytes"]
ERROR = ["code", "message", "path", "tensor", "expected", "got"]


def test_inspect(run: Run, tmp_path: Path) -> None:
    outcome = run("inspect", espalier_draft().write(tmp_path / "e"), "--json")
    document = outcome.document
    assert (outcome.code, outcome.err) == (0, "")
    assert list(document) == [
        "schema_version", "path", "format", "format_version", "quant_method", "producer", "architecture", "model_type",
        "bits", "bits_with_scales", "head_bits", "stated_bits", "stated_head_bits", "components", "total",
        "expert_widths", "expert_banks", "files", "padded_modules", "warnings",
    ]  # fmt: skip
    assert document["schema_version"] == 1
    for part in (*document["components"], document["total"]):
        assert list(part) == ["component", "bytes", "quantized", "plain", "storage"]
        assert list(part["quantized"]) == list(part["plain"]) == NUMBERS
        assert all(list(storage) == ["name", "quantized", *NUMBERS] for storage in part["storage"])
    assert list(document["expert_banks"][0]) == ["bank", "component", "num_experts", "widths"]
    assert all(list(file) == ["name", "size", "kind"] for file in document["files"])
    assert {file["kind"] for file in document["files"]} == {"shard", "index", "config"}
    assert [part["component"] for part in document["components"]] == [
        "experts", "shared expert", "attention", "head", "embeddings", "other",
    ]  # fmt: skip


def test_inspect_holds_the_banks_with_and_without_experts(run: Run, qmoe_espalier: Path) -> None:
    with_option, without = run("inspect", qmoe_espalier, "--json", "--experts"), run("inspect", qmoe_espalier, "--json")
    assert with_option.document == without.document
    assert len(without.document["expert_banks"]) == 5


def test_verify(run: Run, llama_espalier: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama_espalier, tmp_path / "e")
    (folder / "tokenizer.json").write_text("{}")
    outcome = run("verify", folder, "--deep", "--json")
    document = outcome.document
    assert (outcome.code, outcome.err) == (1, "")
    assert list(document) == [
        "schema_version", "path", "format", "ok", "checks", "findings", "recorded_digests", "warnings",
    ]  # fmt: skip
    assert document["ok"] is False
    assert [check["check"] for check in document["checks"]] == [
        "structure", "safetensors", "index", "bits", "scales", "manifest", "digests",
    ]  # fmt: skip
    assert all(list(check) == ["check", "outcome", "detail"] for check in document["checks"])
    assert [list(finding) for finding in document["findings"]] == [ERROR]
    assert document["findings"][0]["got"] == 2
    assert run("verify", llama_espalier, "--json").document["ok"] is True


def test_convert(run: Run, llama_exl3: Path, tmp_path: Path) -> None:
    outcome = run("convert", llama_exl3, tmp_path / "e", "--to", "espalier", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    document = outcome.document
    assert set(document) >= {
        "schema_version", "source", "destination", "source_format", "target_format", "modules", "bytes_read",
        "bytes_written", "files", "warnings",
    }  # fmt: skip
    assert (document["source_format"], document["target_format"], document["modules"]) == ("exl3", "espalier", 15)


@pytest.mark.parametrize("document", ["config", "manifest"])
def test_schema_is_the_one_in_the_specification(run: Run, document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not made from the models, whose schema depends on the release of pydantic."""
    from espalier_format import spec
    from espalier_format.schema import json_schema

    monkeypatch.delattr(json_schema, "schema_documents")
    text = run("schema", document).out
    assert text == Path(spec.__file__).with_name(f"espalier-v1.{document}.schema.json").read_text(encoding="utf-8")
    assert json.loads(text)["type"] == "object"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("inspect", "nothing", "--json"), "missing-file"),
        (("--json", "inspect", "nothing"), "usage"),
        (("inspect", "--json"), "usage"),
        (("verify", "--json", "nothing"), "missing-file"),
        (("convert", "nothing", "else", "--to", "exl3", "--json"), "missing-file"),
    ],
)
def test_errors_are_documents_too(run: Run, arguments: tuple[str, ...], code: str) -> None:
    outcome = run(*arguments)
    assert (outcome.code, outcome.err) == (2, "")
    assert list(outcome.document) == ["schema_version", "error"]
    assert list(outcome.document["error"]) == ERROR
    assert outcome.document["error"]["code"] == code


def test_error_fields(run: Run, tmp_path: Path) -> None:
    draft = espalier_draft()
    name = "model.layers.0.mlp.shared_expert.up_proj.esp_trellis"
    draft[name].shape = (6, 2, 36)
    folder = draft.write(tmp_path / "e")
    error = run("inspect", folder, "--json").document["error"]
    assert (error["code"], error["tensor"]) == ("shape", name)
    assert (error["expected"], error["got"]) == ([6, 3, 24], [6, 2, 36])
    assert error["path"] == str(folder / "model.safetensors")


def test_internal_error_and_debug(run: Run, llama_exl3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --debug the traceback goes to stderr, and stdout stays one document."""

    def fail(*_: object) -> None:
        raise RuntimeError("oops")

    monkeypatch.setattr("espalier_format.operations.inspect.inspect_checkpoint", fail)
    outcome = run("inspect", llama_exl3, "--json", "--debug")
    assert (outcome.code, outcome.document["error"]["code"]) == (2, "internal")
    assert outcome.err.startswith("Traceback")


def test_document_is_ascii(run: Run, tmp_path: Path) -> None:
    draft = espalier_draft(config={"architectures": ["Modèle\u202e\x1b[31m"]})
    outcome = run("inspect", draft.write(tmp_path / "é"), "--json")
    assert outcome.out.isascii()
    assert outcome.out.replace("\n", "").isprintable()
    assert outcome.document["architecture"] == "Modèle\u202e\x1b[31m"
