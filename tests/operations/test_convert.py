"""Which conversions exist, and what each refusal says; what they write is tested with the converters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Draft, Tensor, espalier_draft

from espalier_format.errors import MissingFileError, SourceError, UsageError
from espalier_format.operations.convert import convert


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"to": "gguf"}, "targets are espalier, exl3, hf"),
        ({"to": "exl3", "dtype": "bf16"}, "--dtype"),
        ({"to": "exl3", "digests": True}, "--digests"),
        ({"to": "hf", "digests": True}, "--digests"),
    ],
)
def test_options_that_do_not_go_together(options: Any, words: str, llama_exl3: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        convert(llama_exl3, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_same_format(llama_exl3: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="an EXL3 checkpoint already"):
        convert(llama_exl3, tmp_path / "out", to="exl3")
    espalier = espalier_draft().write(tmp_path / "espalier")
    with pytest.raises(UsageError, match="an Espalier checkpoint already"):
        convert(espalier, tmp_path / "out", to="espalier")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["espalier", "exl3", "hf"])
def test_plain_checkpoint(to: Any, tmp_path: Path) -> None:
    shards = {"model.safetensors": {"a.weight": Tensor.of(np.ones((2, 2)), "F16")}}
    source = Draft({"model_type": "llama"}, shards, index=None).write(tmp_path / "plain")
    with pytest.raises(SourceError, match="not quantized"):
        convert(source, tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()


def test_missing_source(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        convert(tmp_path / "nowhere", tmp_path / "out", to="espalier")


def test_report_is_json(llama_exl3: Path, tmp_path: Path) -> None:
    report = convert(str(llama_exl3), str(tmp_path / "out"), to="espalier")
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
    }


def test_both_formats_convert_to_hugging_face(llama_exl3: Path, tmp_path: Path) -> None:
    convert(llama_exl3, tmp_path / "espalier", to="espalier")
    for name, source in (("a", llama_exl3), ("b", tmp_path / "espalier")):
        report = convert(source, tmp_path / name, to="hf", dtype="bf16")
        assert report.target_format == "hf"
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
