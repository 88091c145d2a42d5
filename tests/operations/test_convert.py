"""Which conversions exist, and what each refusal says; what they write is tested with the converters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Draft, Tensor, espalier_draft

from espalier_format.errors import DigestError, MissingFileError, SourceError, UsageError
from espalier_format.operations.convert import convert_checkpoint


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"to": "gguf"}, "targets are espalier, exl3, hf"),
        ({"to": "exl3", "dtype": "bf16"}, "dtype can be chosen"),
        ({"to": "exl3", "digests": True}, "digests can be added"),
        ({"to": "hf", "digests": True}, "digests can be added"),
    ],
)
def test_options_that_do_not_go_together(options: Any, words: str, llama_exl3: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        convert_checkpoint(llama_exl3, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_same_format(llama_exl3: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="an EXL3 checkpoint already"):
        convert_checkpoint(llama_exl3, tmp_path / "out", to="exl3")
    espalier = espalier_draft().write(tmp_path / "espalier")
    with pytest.raises(UsageError, match="an Espalier checkpoint already"):
        convert_checkpoint(espalier, tmp_path / "out", to="espalier")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["espalier", "exl3", "hf"])
def test_plain_checkpoint(to: Any, tmp_path: Path) -> None:
    shards = {"model.safetensors": {"a.weight": Tensor.of(np.ones((2, 2)), "F16")}}
    source = Draft({"model_type": "llama"}, shards, index=None).write(tmp_path / "plain")
    with pytest.raises(SourceError, match="not quantized"):
        convert_checkpoint(source, tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()


def test_plain_checkpoint_of_another_method(tmp_path: Path) -> None:
    """Only what is not quantized at all can be quantized."""
    shards = {"model.safetensors": {"a.weight": Tensor.of(np.ones((2, 2)), "F16")}}
    draft = Draft({"model_type": "llama"}, shards, index=None)
    with pytest.raises(SourceError, match=r"espalier-format quantize$"):
        convert_checkpoint(draft.write(tmp_path / "plain"), tmp_path / "out", to="espalier")
    draft.config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}
    with pytest.raises(SourceError, match="not quantized in a format that this library reads") as caught:
        convert_checkpoint(draft.write(tmp_path / "gptq"), tmp_path / "out", to="espalier")
    assert "espalier-format quantize" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize("fault", ["missing", "longer"])
@pytest.mark.parametrize("to", ["exl3", "hf"])
def test_source_that_is_not_what_its_manifest_says(
    llama_exl3: Path, tmp_path: Path, name: str, fault: str, to: Any
) -> None:
    """Refused before anything is written. Content is not compared: a byte changed in place goes through."""
    convert_checkpoint(llama_exl3, tmp_path / "espalier", to="espalier")
    path = tmp_path / "espalier" / name
    if fault == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(DigestError) as caught:
        convert_checkpoint(tmp_path / "espalier", tmp_path / "out", to=to)
    assert caught.value.path == str(path)
    assert not (tmp_path / "out").exists()


def test_source_with_an_unreadable_manifest(llama_exl3: Path, tmp_path: Path) -> None:
    convert_checkpoint(llama_exl3, tmp_path / "espalier", to="espalier")
    (tmp_path / "espalier" / "espalier_manifest.json").write_text("{")
    report = convert_checkpoint(tmp_path / "espalier", tmp_path / "out", to="exl3")
    assert "the sizes of the source's files have not been checked" in report.warnings[0]


def test_missing_source(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        convert_checkpoint(tmp_path / "nowhere", tmp_path / "out", to="espalier")


def test_report_is_json(llama_exl3: Path, tmp_path: Path) -> None:
    report = convert_checkpoint(str(llama_exl3), str(tmp_path / "out"), to="espalier")
    assert report.to_json() == {
        "source": str(llama_exl3),
        "destination": str(tmp_path / "out"),
        "source_format": "exl3",
        "target_format": "espalier",
        "modules": 15,
        "bytes_read": sum(path.stat().st_size for path in llama_exl3.iterdir() if path.name != "config.json"),
        "bytes_written": sum(path.stat().st_size for path in (tmp_path / "out").iterdir()),
        "files": sorted(path.name for path in (tmp_path / "out").iterdir()),
        "warnings": [],
        "decode_digests": {},
        "resumed": 0,
    }


def test_both_formats_convert_to_hugging_face(llama_exl3: Path, tmp_path: Path) -> None:
    convert_checkpoint(llama_exl3, tmp_path / "espalier", to="espalier")
    for name, source in (("a", llama_exl3), ("b", tmp_path / "espalier")):
        report = convert_checkpoint(source, tmp_path / name, to="hf", dtype="bf16")
        assert report.target_format == "hf"
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
