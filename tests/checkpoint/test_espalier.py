"""Opening Espalier checkpoints: what is found, and that every disagreement of config, index and headers is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import INDEX, Bank, Draft, Module, Tensor, bf16, espalier_draft

from espalier_format.checkpoint import open_checkpoint
from espalier_format.errors import (
    DtypeError,
    DuplicateTensorError,
    EspalierError,
    FormatVersionError,
    IndexMismatchError,
    MissingFileError,
    MissingTensorError,
    PathError,
    SchemaError,
    ShapeError,
    UnexpectedTensorError,
)

BANK = "model.layers.0.mlp.experts"
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def draft() -> Draft:
    return espalier_draft(num_shards=2)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def refused(draft: Draft, folder: Path, kind: type[EspalierError]) -> str:
    draft.write(folder)
    with pytest.raises(EspalierError) as caught:
        open_checkpoint(folder)
    assert type(caught.value) is kind
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_everything_is_found(tmp_path: Path, num_shards: int) -> None:
    draft = espalier_draft(num_shards=num_shards)
    draft.files["tokenizer.json"] = b"{}"
    draft.files["sub/notes.txt"] = b"x"
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        assert checkpoint.format == "espalier"
        assert list(checkpoint.tensors) == draft.names()
        trellises = [name for name in draft.names() if name.endswith(".esp_trellis")]
        assert [f"{name}.esp_trellis" for name in checkpoint.modules] == trellises
        assert checkpoint.other_files == ("sub/notes.txt", "tokenizer.json")
        assert checkpoint.warnings == ()
        assert len(checkpoint.shards) == num_shards
        owned = {tensor.name for module in checkpoint.modules.values() for tensor in module.tensors}
        assert owned.isdisjoint(checkpoint.plain)
        assert owned | set(checkpoint.plain) == set(draft.names())
        assert checkpoint.config == draft.config
        for name in draft.names():
            array = checkpoint.tensor(name)
            assert array.tobytes() == draft[name].data
            assert array.shape == draft[name].shape


def test_modules_have_the_sizes_of_the_config(tmp_path: Path, draft: Draft) -> None:
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        module = checkpoint.modules[Q]
        assert (module.in_features, module.out_features, module.padded_in, module.padded_out) == (96, 64, 96, 64)
        assert (module.rotation.in_, module.rotation.out) == (32, 64)
        assert module.codebook.name == "int6@4"
        assert module.weights == 96 * 64
        assert module.trellis_bytes == 96 * 64 * 4 // 8
        assert module.scale_bytes == 2 * (96 + 64)
        assert module.bias is not None
        assert module.bias.shape == (64,)
        head = checkpoint.modules["lm_head"]
        assert (head.out_features, head.padded_out, head.size_source) == (150, 256, "exact")
        expert = checkpoint.modules[f"{BANK}.3.gate_proj"]
        assert (expert.codebook.name, expert.in_features, expert.bias) == ("int5@3", 96, None)
        suh, svh = head.scales()
        assert suh.tobytes() == draft["lm_head.esp_suh"].data
        assert not svh[150:].any()


def test_expert_banks(tmp_path: Path, draft: Draft) -> None:
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        bank = checkpoint.expert_banks[BANK]
        assert bank.num_experts == 4
        assert bank.projections["down_proj"] == (
            f"{BANK}.0.down_proj",
            f"{BANK}.1.down_proj",
            None,
            f"{BANK}.3.down_proj",
        )
        assert f"{BANK}.2.down_proj.weight" in checkpoint.plain


def test_modules_is_a_read_only_mapping(tmp_path: Path, draft: Draft) -> None:
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        assert checkpoint.modules[Q] is checkpoint.modules[Q]
        assert Q in checkpoint.modules
        assert "x" not in checkpoint.modules
        assert 3 not in checkpoint.modules
        with pytest.raises(KeyError):
            checkpoint.modules["x"]
        with pytest.raises(TypeError):
            checkpoint.modules[Q] = None  # type: ignore[index]


def test_arrays_outlive_the_checkpoint(tmp_path: Path, draft: Draft) -> None:
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        array = checkpoint.tensor(f"{Q}.esp_suh")
    assert array.tobytes() == draft[f"{Q}.esp_suh"].data


def test_no_file_stays_open_after_a_refusal(tmp_path: Path, draft: Draft) -> None:
    del draft[f"{Q}.esp_suh"]
    before = open_files()
    refused(draft, tmp_path, MissingTensorError)
    assert open_files() == before


@pytest.mark.parametrize("name", [f"{Q}.esp_trellis", f"{Q}.esp_suh", f"{Q}.esp_svh", f"{BANK}.1.gate_proj.esp_svh"])
def test_a_missing_tensor(tmp_path: Path, draft: Draft, name: str) -> None:
    del draft[name]
    assert name in refused(draft, tmp_path, MissingTensorError)


def test_a_missing_plain_expert(tmp_path: Path, draft: Draft) -> None:
    del draft[f"{BANK}.2.gate_proj.weight"]
    assert f"{BANK}.2.gate_proj.weight" in refused(draft, tmp_path, MissingTensorError)


def test_a_bank_that_promises_more_experts_than_there_are(tmp_path: Path, draft: Draft) -> None:
    """A count far beyond the file costs no time: the first missing expert ends it."""
    bank = draft.block["expert_banks"][BANK]
    bank["num_experts"] = 200_000
    for projection in bank["projections"].values():
        projection["assignment"] = "01-2" + "0" * 199_996
    assert f"{BANK}.4.gate_proj" in refused(draft, tmp_path, MissingTensorError)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.q_proj.esp_trellis",
        f"{Q}.esp_new",
        f"{BANK}.2.gate_proj.esp_suh",
        f"{BANK}.4.gate_proj.esp_suh",
        f"{BANK}.0.up_proj.esp_suh",
        "esp_trellis",
        "a.esp_",
    ],
)
def test_an_unexpected_tensor(tmp_path: Path, draft: Draft, name: str) -> None:
    draft.shards["model-00002-of-00002.safetensors"][name] = Tensor("F16", (1,), b"\0\0")
    assert name in refused(draft, tmp_path, UnexpectedTensorError)


@pytest.mark.parametrize("name", ["x.esp_suh.weight", "esp.weight", "a.bespoke", "resp_x"])
def test_names_that_only_look_like_quantized_tensors(tmp_path: Path, draft: Draft, name: str) -> None:
    draft[name] = Tensor("F16", (1,), b"\0\0")
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        assert name in checkpoint.plain


@pytest.mark.parametrize("scale", ["suh", "su", "svh", "sv"])
def test_an_exl3_module_is_refused(tmp_path: Path, draft: Draft, scale: str) -> None:
    draft["x.trellis"] = Tensor("I16", (8, 8, 16), bytes(2048))
    draft[f"x.{scale}"] = Tensor("F16", (128,), bytes(256))
    assert "x.trellis" in refused(draft, tmp_path, UnexpectedTensorError)


def test_a_row_table_is_plain(tmp_path: Path, draft: Draft) -> None:
    draft["x.trellis"] = Tensor("I16", (4, 33), bytes(264))
    draft["x.signs"] = Tensor("F16", (1, 256), bytes(512))
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        assert "x.trellis" in checkpoint.plain


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (f"{Q}.esp_trellis", "F16"),
        (f"{Q}.esp_trellis", "U16"),
        (f"{Q}.esp_suh", "BF16"),
        (f"{Q}.esp_svh", "I16"),
        (f"{Q}.bias", "I16"),
    ],
)
def test_a_wrong_dtype(tmp_path: Path, draft: Draft, name: str, dtype: str) -> None:
    draft[name].dtype = dtype
    line = refused(draft, tmp_path, DtypeError)
    assert name in line
    assert dtype in line


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_a_bias_of_any_floating_dtype(tmp_path: Path, draft: Draft, dtype: str) -> None:
    draft[f"{Q}.bias"] = bf16(np.zeros(64)) if dtype == "BF16" else Tensor.of(np.zeros(64), dtype)
    open_checkpoint(draft.write(tmp_path)).close()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{Q}.esp_trellis", (6, 4, 32)),
        (f"{Q}.esp_trellis", (4, 6, 64)),
        (f"{Q}.esp_trellis", (24, 64)),
        (f"{Q}.esp_suh", (64,)),
        (f"{Q}.esp_suh", (1, 96)),
        (f"{Q}.esp_svh", (96,)),
        (f"{Q}.bias", (1, 64)),
        ("lm_head.bias", (256,)),
        (f"{BANK}.3.down_proj.esp_trellis", (4, 6, 32)),
        (f"{BANK}.2.gate_proj.weight", (96, 64)),
    ],
)
def test_a_wrong_shape(tmp_path: Path, draft: Draft, name: str, shape: tuple[int, ...]) -> None:
    """lm_head has 150 outputs, padded to 256: its bias must not be padded."""
    size = int(np.prod(shape)) * 2
    draft[name] = Tensor(draft[name].dtype, shape, bytes(size))
    assert name in refused(draft, tmp_path, ShapeError)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"espalier_format_version": "2"}])
@pytest.mark.parametrize("shard", [1, 2])
def test_a_shard_without_its_version(tmp_path: Path, draft: Draft, metadata: dict[str, str] | None, shard: int) -> None:
    name = f"model-0000{shard}-of-00002.safetensors"
    draft.metadata.pop(name)
    if metadata is not None:
        draft.metadata[name] = metadata
    assert name in refused(draft, tmp_path, FormatVersionError)


def test_a_shard_of_plain_tensors_needs_no_version(tmp_path: Path, draft: Draft) -> None:
    draft.shards["plain.safetensors"] = {"x": Tensor("F16", (1,), b"\0\0")}
    open_checkpoint(draft.write(tmp_path)).close()


def test_a_missing_index(tmp_path: Path, draft: Draft) -> None:
    draft.index = None
    assert INDEX in refused(draft, tmp_path, MissingFileError)


def spoil_index(index: dict[str, Any], fault: str) -> None:
    weight_map = index["weight_map"]
    if fault == "missing":
        del weight_map[f"{Q}.esp_suh"]
    elif fault == "extra":
        weight_map["x"] = "model-00001-of-00002.safetensors"
    elif fault == "other shard":
        weight_map["model.embed_tokens.weight"] = "model-00002-of-00002.safetensors"
    elif fault == "no such shard":
        weight_map["model.embed_tokens.weight"] = "model-00003-of-00003.safetensors"
    else:
        index["metadata"]["total_size"] += 1


@pytest.mark.parametrize("fault", ["missing", "extra", "other shard", "no such shard", "size"])
def test_an_index_that_disagrees(tmp_path: Path, draft: Draft, fault: str) -> None:
    draft.index = draft.right_index()
    spoil_index(draft.index, fault)
    refused(draft, tmp_path, IndexMismatchError)


def test_a_missing_shard_is_named_once(tmp_path: Path, draft: Draft) -> None:
    """Not once for each of its tensors."""
    draft.write(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(IndexMismatchError) as caught:
        open_checkpoint(tmp_path)
    said = "names model-00002-of-00002.safetensors, which is not there (1 of 2 shards); is the download complete?"
    assert str(caught.value) == f"{tmp_path / INDEX}: {said}"


def test_a_stray_shard(tmp_path: Path, draft: Draft) -> None:
    """Also one without any tensor, which no index can name."""
    draft.index = draft.right_index()
    draft.shards["stray.safetensors"] = {}
    assert "stray.safetensors" in refused(draft, tmp_path / "empty", IndexMismatchError)
    draft.shards["stray.safetensors"] = {"x": Tensor("F16", (1,), b"\0\0")}
    refused(draft, tmp_path / "one", IndexMismatchError)


def test_the_size_in_the_index_is_optional(tmp_path: Path, draft: Draft) -> None:
    draft.index = draft.right_index()
    draft.index["metadata"] = {}
    open_checkpoint(draft.write(tmp_path)).close()


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "a\\b"])
def test_an_index_that_leads_out(tmp_path: Path, draft: Draft, name: str) -> None:
    draft.index = draft.right_index()
    draft.index["weight_map"]["model.embed_tokens.weight"] = name
    refused(draft, tmp_path, PathError)


def test_a_tensor_in_two_shards(tmp_path: Path, draft: Draft) -> None:
    """Equal or not: no index can be right about it."""
    draft.shards["model-00002-of-00002.safetensors"]["model.embed_tokens.weight"] = draft["model.embed_tokens.weight"]
    refused(draft, tmp_path, DuplicateTensorError)


def test_a_config_without_the_block(tmp_path: Path, draft: Draft) -> None:
    draft.config = {}
    assert "quantization_config" in refused(draft, tmp_path, FormatVersionError)


@pytest.mark.parametrize("method", ["exl3", "gptq", None])
def test_another_method_cannot_hide_quantized_tensors(tmp_path: Path, draft: Draft, method: str | None) -> None:
    draft.config = {"quantization_config": {"quant_method": method}}
    refused(draft, tmp_path, FormatVersionError)


def test_no_config(tmp_path: Path, draft: Draft) -> None:
    draft.config = None
    assert "config.json" in refused(draft, tmp_path, MissingFileError)


def test_a_lone_shard(tmp_path: Path, draft: Draft) -> None:
    draft.write(tmp_path)
    with pytest.raises(MissingFileError, match=r"config\.json; open the folder instead"):
        open_checkpoint(tmp_path / "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("block", ["espalier", [], 3])
def test_a_block_that_is_no_object(tmp_path: Path, draft: Draft, block: object) -> None:
    draft.config = {"quantization_config": block}
    refused(draft, tmp_path, SchemaError)


def test_mtp_and_vision_modules(tmp_path: Path) -> None:
    modules = (Module("mtp.layers.0.self_attn.q_proj", 32, 32), Module("model.visual.blocks.0.attn.proj", 32, 32))
    banks = (Bank("mtp.layers.0.mlp.experts", {"w1": (64, 64)}, ("e2m1@2",), "00"),)
    with open_checkpoint(espalier_draft(modules, banks).write(tmp_path)) as checkpoint:
        assert len(checkpoint.modules) == 4
        assert checkpoint.quantization is not None
        assert checkpoint.quantization.bits == 0.0


def test_order_of_checks(draft: Draft, tmp_path: Path) -> None:
    """errors.md §4: one fault more for each step, from the last to the first; always the earliest is reported."""
    del draft[f"{Q}.esp_suh"]
    draft.index = draft.right_index()
    folder = draft.write(tmp_path)
    index, config, shard = folder / INDEX, folder / "config.json", folder / next(iter(draft.metadata))

    def version() -> None:
        data = shard.read_bytes()
        assert data.count(b'"espalier_format_version":"1"') == 1
        shard.write_bytes(data.replace(b'"espalier_format_version":"1"', b'"espalier_format_version":"2"'))

    def block() -> None:
        config.write_text(config.read_text().replace('"format_version": 1', '"format_version": 1, "new": 0'))

    def no_shards() -> None:
        for path in folder.glob("*.safetensors"):
            path.unlink()

    faults: tuple[tuple[str, Callable[[], object]], ...] = (
        ("missing-tensor", lambda: None),
        ("index-mismatch", lambda: index.write_text(json.dumps({"weight_map": {}}))),
        ("schema", lambda: index.write_text("{}")),
        ("format-version", version),
        ("truncated", lambda: shard.write_bytes(shard.read_bytes()[:-1])),
        ("schema", block),
        ("malformed", lambda: config.write_text("{")),
        ("unsupported-source", no_shards),
    )
    for code, spoil in faults:
        spoil()
        with pytest.raises(EspalierError) as caught:
            open_checkpoint(folder)
        assert caught.value.code == code
