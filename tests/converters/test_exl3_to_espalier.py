"""What an Espalier checkpoint made from EXL3 says and holds, beyond what the way back shows."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import INDEX, Draft, Exl3Module, Tensor, bf16, exl3_draft, llama_config, llama_modules, read_safetensors

from espalier_format.checkpoint import Checkpoint, open_checkpoint
from espalier_format.converters.exl3_listing import tensor_list_sha256
from espalier_format.converters.exl3_to_espalier import exl3_to_espalier
from espalier_format.errors import (
    CodebookError,
    LimitError,
    NonFiniteScaleError,
    OutputExistsError,
    SchemaError,
    SourceError,
    UnexpectedTensorError,
    UsageError,
)
from espalier_format.operations.convert import convert_checkpoint

MANIFEST = "espalier_manifest.json"
K_PROJ = "model.layers.0.self_attn.k_proj"  # 192 x 64, stored as 256 x 128
HEAD = Exl3Module("lm_head", 192, 90, 6)


def draft_with(modules: list[Exl3Module] | None = None, plain: dict[str, Tensor] | None = None, **config: Any) -> Draft:
    chosen = [*(Exl3Module(*shape) for shape in llama_modules()), HEAD] if modules is None else modules
    return exl3_draft(chosen, plain or {}, config=llama_config(**config))


def converted(draft: Draft, work: Path, **options: Any) -> tuple[Path, dict[str, Any], tuple[str, ...]]:
    """Convert; return the folder, its quantization_config and the warnings."""
    report = convert_checkpoint(draft.write(work / "exl3"), work / "espalier", to="espalier", **options)
    config = json.loads((work / "espalier" / "config.json").read_text())
    return work / "espalier", config["quantization_config"], report.warnings


def test_config_of_a_llama(tmp_path: Path) -> None:
    draft = draft_with([Exl3Module(*shape, 2.5, "mul1") for shape in llama_modules()] + [HEAD])
    original = dict(draft.block)
    _, block, warnings = converted(draft, tmp_path)
    assert warnings == ()
    assert block["quant_method"] == "espalier"
    assert block["format_version"] == 1
    assert block["required_features"] == []
    assert block["expert_banks"] == {}
    assert set(block["codebooks"]) == {"exl3-mul1@2.5", "exl3-mcg@6"}
    assert block["modules"][K_PROJ] == {
        "codebook": "exl3-mul1@2.5",
        "in_features": 192,
        "out_features": 64,
        "rotation": {"in": 128, "out": 128},
        "size_source": "exact",
    }
    assert {name: (entry["in_features"], entry["out_features"]) for name, entry in block["modules"].items()} == {
        **{name: (inputs, outputs) for name, inputs, outputs in llama_modules()},
        "lm_head": (192, 90),
    }
    assert block["source"]["format"] == "exl3"
    assert block["source"]["quantization_config"] == original
    # 2.5 bits times stored size over true size, by hand for the seven modules.
    stored = 256 * (256 + 128 + 128) + 256 * 256 + 2 * 256 * 384 + 384 * 256
    true = 192 * (192 + 64 + 64) + 192 * 192 + 3 * 192 * 320
    assert block["bits"] == round(2.5 * stored / true, 6)
    assert block["head_bits"] == round(6 * 256 * 128 / (192 * 90), 6)


def test_qmoe_sizes_banks_and_ignore(qmoe_exl3: Path, tmp_path: Path) -> None:
    convert_checkpoint(qmoe_exl3, tmp_path / "out", to="espalier")
    block = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    bank = block["expert_banks"]["model.language_model.layers.2.mlp.experts"]
    assert bank["num_experts"] == 8
    assert bank["projections"]["down_proj"] == {
        "in_features": 128,
        "out_features": 256,
        "rotation": {"in": 128, "out": 128},
        "size_source": "exact",
        "codebooks": ["exl3-mul1@2.5"],
        "assignment": "00000000",
    }
    assert len(block["expert_banks"]) == 5
    assert not [name for name in block["modules"] if ".experts." in name]
    sizes = {name: (entry["in_features"], entry["out_features"]) for name, entry in block["modules"].items()}
    assert sizes["lm_head"] == (256, 320)
    assert sizes["model.language_model.layers.3.self_attn.q_proj"] == (256, 512)
    assert sizes["model.language_model.layers.0.linear_attn.in_proj_qkv"] == (256, 1024)
    assert sizes["mtp.fc"] == (512, 256)
    assert sizes["model.visual.merger.linear_fc2"] == (512, 256)
    assert {entry["size_source"] for entry in block["modules"].values()} == {"exact"}
    assert block["ignore"] == sorted(
        [f"model.language_model.layers.{n}.mlp.{gate}" for n in range(4) for gate in ("gate", "shared_expert_gate")]
        + [f"model.language_model.layers.{n}.linear_attn.in_proj_{x}" for n in range(3) for x in "ab"]
        + ["mtp.layers.0.mlp.gate", "mtp.layers.0.mlp.shared_expert_gate"]
        + [f"model.visual.blocks.{n}.attn.qkv" for n in range(2)]
    )


def test_shards_and_their_metadata(tmp_path: Path) -> None:
    plain = {"model.norm.weight": Tensor.of(np.ones(192), "F16")}
    draft = exl3_draft([Exl3Module(*shape) for shape in llama_modules()], {}, num_shards=2, config=llama_config())
    draft.shards["plain.safetensors"] = plain
    draft.metadata["plain.safetensors"] = {"written_by": "somebody"}
    folder, _, _ = converted(draft, tmp_path)
    for name in draft.shards:
        stored, metadata = read_safetensors(folder / name)
        if name == "plain.safetensors":
            assert (folder / name).read_bytes() == (tmp_path / "exl3" / name).read_bytes()
        else:
            assert metadata == {"format": "pt", "espalier_format_version": "1"}
            assert not [tensor for tensor in stored if tensor.endswith((".mcg", ".trellis", ".suh", ".svh"))]
    index = json.loads((folder / INDEX).read_text())
    held = {name: shard for shard in draft.shards for name in read_safetensors(folder / shard)[0]}
    assert index["weight_map"] == held


def test_expanded_signs_are_plus_and_minus_one(tmp_path: Path) -> None:
    draft = draft_with([Exl3Module(K_PROJ, 192, 64, packed_su=True)])
    words = draft[f"{K_PROJ}.su"].array().view(np.uint16)
    folder, block, _ = converted(draft, tmp_path)
    stored, _ = read_safetensors(folder / "model.safetensors")
    assert stored[f"{K_PROJ}.esp_suh"].dtype == "F16"
    expected = [0xBC00 if words[n // 16] >> (n % 16) & 1 else 0x3C00 for n in range(256)]
    assert stored[f"{K_PROJ}.esp_suh"].array().view(np.uint16).tolist() == expected
    assert block["source"]["packed_signs"] == [f"{K_PROJ}.su"]


@pytest.mark.parametrize("dtype", ["F16", "F32", "BF16"])
def test_padded_bias_is_cropped(dtype: str, tmp_path: Path) -> None:
    draft = draft_with([Exl3Module(K_PROJ, 192, 64, bias=dtype)])
    original = draft[f"{K_PROJ}.bias"]
    folder, block, _ = converted(draft, tmp_path)
    stored, _ = read_safetensors(folder / "model.safetensors")
    bias = stored[f"{K_PROJ}.bias"]
    assert (bias.dtype, bias.shape) == (dtype, (64,))
    assert bias.data == original.data[: len(original.data) // 2]
    assert block["modules"][K_PROJ]["size_source"] == "exact"
    assert "unpadded_bias" not in block["source"]


@pytest.mark.parametrize("tail", [1.0, -0.0])
def test_bias_with_values_beyond_the_true_size_keeps_its_padded_size(tail: float, tmp_path: Path) -> None:
    draft = draft_with([Exl3Module(K_PROJ, 192, 64, bias="F16"), HEAD])
    values = draft[f"{K_PROJ}.bias"].array().copy()
    values[-1] = tail
    draft[f"{K_PROJ}.bias"] = Tensor.of(values, "F16")
    folder, block, warnings = converted(draft, tmp_path)
    entry = block["modules"][K_PROJ]
    assert (entry["in_features"], entry["out_features"], entry["size_source"]) == (256, 128, "padded")
    assert block["modules"]["lm_head"]["size_source"] == "exact"
    assert warnings == (f"padded size kept: the bias of {K_PROJ} is not zero beyond the true size",)
    stored, _ = read_safetensors(folder / "model.safetensors")
    assert stored[f"{K_PROJ}.bias"].data == draft[f"{K_PROJ}.bias"].data


def test_bias_of_the_true_size_is_noted(tmp_path: Path) -> None:
    modules = [Exl3Module(K_PROJ, 192, 64, bias="F16", unpadded_bias=True)]
    _, block, _ = converted(draft_with(modules), tmp_path)
    assert block["source"]["unpadded_bias"] == [K_PROJ]


@pytest.mark.parametrize(
    ("zeros", "true_out", "word"),
    [(64, 64, None), (10, 64, "padded size kept: the svh of"), (0, 64, None), (128, 64, None)],
)
def test_zeros_in_svh_only_cross_check(zeros: int, true_out: int, word: str | None, tmp_path: Path) -> None:
    draft = draft_with([Exl3Module(K_PROJ, 192, true_out)])
    svh = np.ones(128)
    svh[128 - zeros :] = 0
    draft[f"{K_PROJ}.svh"] = Tensor.of(svh, "F16")
    _, block, warnings = converted(draft, tmp_path)
    entry = block["modules"][K_PROJ]
    assert (entry["out_features"], entry["size_source"]) == ((128, "padded") if word else (64, "exact"))
    assert [word in warning for warning in warnings] == ([True] if word else [])


def test_zeros_in_svh_hint_at_unknown_sizes(tmp_path: Path) -> None:
    draft = draft_with([Exl3Module(K_PROJ, 192, 64)], model_type="never-heard-of")
    _, block, warnings = converted(draft, tmp_path)
    assert block["modules"][K_PROJ]["size_source"] == "padded"
    assert f"svh of {K_PROJ} ends in 64 zeros: its true output size may be 64" in warnings
    assert any("never-heard-of" in warning for warning in warnings)


@pytest.mark.parametrize(("top", "nested"), [(True, None), (True, True), (False, True), (None, True)])
def test_ties_are_undone_where_a_head_is_quantized(top: bool | None, nested: bool | None, tmp_path: Path) -> None:
    draft = draft_with()
    assert draft.config is not None
    draft.config.pop("tie_word_embeddings")
    if top is not None:
        draft.config["tie_word_embeddings"] = top
    if nested is not None:
        draft.config["text_config"] = {**llama_config(), "tie_word_embeddings": nested}
    folder, block, _ = converted(draft, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    replaced = {}
    if top is not None:
        assert config["tie_word_embeddings"] is False
    if nested is not None:
        assert config["text_config"]["tie_word_embeddings"] is False
    if top:
        replaced["tie_word_embeddings"] = True
    if nested:
        replaced["text_config.tie_word_embeddings"] = True
    assert block["source"]["replaced_config"] == replaced


def test_ties_stay_without_a_quantized_head(tmp_path: Path) -> None:
    draft = draft_with([Exl3Module(*shape) for shape in llama_modules()], tie_word_embeddings=True)
    folder, block, _ = converted(draft, tmp_path)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert "replaced_config" not in block["source"]


def test_experts_of_mixed_width_are_one_line(tmp_path: Path) -> None:
    bank = "model.layers.0.mlp.experts"
    widths = [(2, "mul1"), (1.5, "mul1"), None, (2, "mcg"), (1.5, "mul1")]
    modules, plain = [], {}
    for number, width in enumerate(widths):
        if width is None:
            plain[f"{bank}.{number}.up_proj.weight"] = bf16(np.zeros((64, 192)))
        else:
            modules.append(Exl3Module(f"{bank}.{number}.up_proj", 192, 64, *width))
    draft = draft_with(modules, plain, model_type="qwen3_moe", moe_intermediate_size=64)
    _, block, _ = converted(draft, tmp_path)
    projection = block["expert_banks"][bank]["projections"]["up_proj"]
    assert projection["codebooks"] == ["exl3-mul1@1.5", "exl3-mcg@2", "exl3-mul1@2"]
    assert projection["assignment"] == "20-10"
    assert block["modules"] == {}
    assert block["ignore"] == [f"{bank}.2.up_proj"]


def test_irregular_projection_is_listed_as_modules(tmp_path: Path) -> None:
    """A bias that cannot be cropped gives one expert another size than the others."""
    bank = "model.layers.0.mlp.experts"
    modules = [
        Exl3Module(f"{bank}.{number}.{name}", 192, 64, bias="F16")
        for number in (0, 1)
        for name in ("up_proj", "gate_proj")
    ]
    draft = draft_with(modules, model_type="qwen3_moe", moe_intermediate_size=64)
    draft[f"{bank}.1.up_proj.bias"] = Tensor.of(np.ones(128), "F16")
    _, block, _ = converted(draft, tmp_path)
    assert set(block["expert_banks"][bank]["projections"]) == {"gate_proj"}
    assert {name: entry["size_source"] for name, entry in block["modules"].items()} == {
        f"{bank}.0.up_proj": "exact",
        f"{bank}.1.up_proj": "padded",
    }


@pytest.mark.parametrize("tail", [0.0, 1.0])
def test_a_bias_that_keeps_padded_sizes_breaks_up_a_bank_with_plain_experts(tail: float, tmp_path: Path) -> None:
    """The plain expert has the true size, so it cannot share a projection with modules of the padded one."""
    bank = "model.layers.0.mlp.experts"
    draft = draft_with([Exl3Module(f"{bank}.{e}.up_proj", 192, 64, bias="F16") for e in (0, 1)])
    for e in (0, 1):
        values = draft[f"{bank}.{e}.up_proj.bias"].array().copy()
        values[-1] = tail
        draft[f"{bank}.{e}.up_proj.bias"] = Tensor.of(values, "F16")
    draft[f"{bank}.2.up_proj.weight"] = bf16(np.ones((64, 192)))
    draft[f"{bank}.0.up_proj.weight"] = bf16(np.ones((64, 192)))
    draft[f"{bank}.1.up_proj.weight"] = bf16(np.ones((64, 192)))
    folder, block, _ = converted(draft, tmp_path)
    open_checkpoint(folder).close()
    if tail:
        assert block["expert_banks"] == {}
        assert {entry["size_source"] for entry in block["modules"].values()} == {"padded"}
    else:
        assert block["expert_banks"][bank]["projections"]["up_proj"]["assignment"] == "00-"
    assert block["ignore"] == [f"{bank}.2.up_proj"]


def test_plain_modules_with_names_that_a_config_cannot_hold_are_not_ignored(tmp_path: Path) -> None:
    draft = draft_with()
    for name in ("a..b", "a\nb", "c"):
        draft[f"{name}.weight"] = bf16(np.ones((2, 2)))
    folder, block, _ = converted(draft, tmp_path)
    assert block["ignore"] == ["c"]
    open_checkpoint(folder).close()


def test_embeddings_and_other_matrices_in_ignore(tmp_path: Path) -> None:
    matrix = Tensor.of(np.zeros((4, 4)), "F16")
    names = {
        "model.embed_tokens": False,
        "model.embed_tokens_per_layer": False,
        "model.visual.pos_embed": False,
        "vision_tower.embeddings.position_embedding": False,
        "transformer.wte": False,
        "model.embed_vision.embedding_projection": True,
        "model.layers.0.mlp.gate": True,
        "model..odd": False,
        K_PROJ: False,
    }
    plain = {f"{name}.weight": matrix for name in names} | {"model.norm.weight": Tensor.of(np.ones(4), "F16")}
    plain[f"{K_PROJ}.weight"] = Tensor.of(np.zeros((64, 192)), "F16")
    _, block, _ = converted(draft_with([Exl3Module(K_PROJ, 192, 64)], plain), tmp_path)
    assert block["ignore"] == sorted(name for name, listed in names.items() if listed)


def test_manifest_lists_every_file(llama_exl3: Path, tmp_path: Path) -> None:
    report = convert_checkpoint(llama_exl3, tmp_path / "out", to="espalier")
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    on_disk = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert set(manifest["files"]) == set(on_disk) - {MANIFEST}
    for name, entry in manifest["files"].items():
        data = on_disk[name]
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        assert entry == {
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "git_blob_sha1": blob,
        }
    assert "decode_digests" not in manifest
    assert report.files == tuple(sorted(on_disk))
    assert report.bytes_written == sum(map(len, on_disk.values()))


def test_manifest_and_signature_of_the_source_are_left_behind(tmp_path: Path) -> None:
    draft = draft_with()
    draft.files |= {MANIFEST: b"{}", f"{MANIFEST}.sig": b"old", "README.md": b"kept"}
    folder, _, _ = converted(draft, tmp_path)
    assert not (folder / f"{MANIFEST}.sig").exists()
    assert (folder / "README.md").read_bytes() == b"kept"
    assert "README.md" not in json.loads((folder / MANIFEST).read_text())["files"]


def test_decode_digests_are_computed_in_threads(
    llama_exl3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at a time where there are two processors: each of the first two waits for the other."""
    one = convert_checkpoint(llama_exl3, tmp_path / "one", to="espalier", digests=True)
    real, both = Checkpoint.digest, threading.Barrier(2, timeout=20)
    calls: list[str] = []

    def digest(self: Checkpoint, name: str, device: str | None = None) -> str:
        calls.append(name)
        if len(calls) <= 2:
            both.wait()
        return real(self, name, device)

    monkeypatch.setattr(Checkpoint, "digest", digest)
    monkeypatch.setattr("espalier_format.converters.exl3_to_espalier.processors", lambda: 2)
    two = convert_checkpoint(llama_exl3, tmp_path / "two", to="espalier", digests=True)
    assert list(two.decode_digests.items()) == list(one.decode_digests.items())
    assert sorted(calls) == sorted(one.decode_digests)


def test_decode_digests_on_request(llama_exl3: Path, tmp_path: Path) -> None:
    """The digest itself is checked against another decoder in the tests of the kernels."""
    report = convert_checkpoint(llama_exl3, tmp_path / "out", to="espalier", digests=True)
    digests = json.loads((tmp_path / "out" / MANIFEST).read_text())["decode_digests"]
    with open_checkpoint(llama_exl3) as checkpoint:
        codes = checkpoint.codes("lm_head")
        assert set(digests) == set(checkpoint.modules)
    assert digests["lm_head"] == hashlib.sha256(np.ascontiguousarray(codes).view("<i2").tobytes()).hexdigest()
    assert report.decode_digests == digests


@pytest.mark.parametrize("kind", ["suh", "svh"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_scale_writes_nothing(kind: str, value: float, tmp_path: Path) -> None:
    draft = draft_with()
    values = draft[f"{K_PROJ}.{kind}"].array().copy()
    values[-1] = value
    draft[f"{K_PROJ}.{kind}"] = Tensor.of(values, "F16")
    source = draft.write(tmp_path / "exl3")
    with pytest.raises(NonFiniteScaleError, match=f"{K_PROJ}.{kind}"):
        convert_checkpoint(source, tmp_path / "deep" / "out", to="espalier")
    assert not (tmp_path / "deep").exists()


def test_other_refusals_write_nothing(tmp_path: Path) -> None:
    draft = draft_with()
    draft[f"{K_PROJ}.mcg"] = Tensor("I32", (), b"\1\2\3\4")
    with pytest.raises(CodebookError):
        convert_checkpoint(draft.write(tmp_path / "marker"), tmp_path / "out", to="espalier")
    without = exl3_draft([], config=llama_config()).write(tmp_path / "none")
    with pytest.raises(SourceError, match="no quantized module"):
        convert_checkpoint(without, tmp_path / "out", to="espalier")
    draft = draft_with()
    draft["x.scale"] = Tensor.of(np.ones(1), "F16")
    draft[f"{K_PROJ}.scale"] = Tensor.of(np.ones(1), "F16")
    with pytest.raises(UnexpectedTensorError):
        convert_checkpoint(draft.write(tmp_path / "scale"), tmp_path / "out", to="espalier")
    assert not (tmp_path / "out").exists()


def test_block_that_would_be_too_deep_writes_nothing(tmp_path: Path) -> None:
    """The block of the source stands two levels deeper in an Espalier config."""
    draft = draft_with()
    deep: list[Any] = []
    for _ in range(59):
        deep = [deep]
    draft.block["deep"] = deep
    assert converted(draft, tmp_path)
    draft.block["deep"] = [deep]
    source = draft.write(tmp_path / "deeper")
    with pytest.raises(LimitError, match="nested"):
        convert_checkpoint(source, tmp_path / "out", to="espalier")
    assert not (tmp_path / "out").exists()


def test_module_names_that_a_config_cannot_hold(tmp_path: Path) -> None:
    source = draft_with([Exl3Module("model..up_proj", 128, 128)]).write(tmp_path / "exl3")
    with pytest.raises(SchemaError, match=r"model\.\.up_proj: a config cannot hold the name of this module") as caught:
        convert_checkpoint(source, tmp_path / "out", to="espalier")
    assert caught.value.path == str(source / "model.safetensors")
    assert not (tmp_path / "out").exists()


def test_destination_rules(tmp_path: Path) -> None:
    source = draft_with().write(tmp_path / "exl3")
    with pytest.raises(UsageError):
        convert_checkpoint(source, source / "inside", to="espalier")
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("mine")
    for force in (False, True):
        with pytest.raises(OutputExistsError):
            convert_checkpoint(source, out, to="espalier", force=force)
    assert [path.name for path in out.iterdir()] == ["precious"]
    convert_checkpoint(source, tmp_path / "again", to="espalier")
    with pytest.raises(OutputExistsError):
        convert_checkpoint(source, tmp_path / "again", to="espalier")
    convert_checkpoint(source, tmp_path / "again", to="espalier", force=True)


def test_failure_in_the_middle_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = draft_with().write(tmp_path / "exl3")

    class StopError(Exception):
        pass

    class Impatient:
        def start(self, total_bytes: int, label: str) -> None:
            pass

        def advance(self, n_bytes: int) -> None:
            raise StopError

        def finish(self) -> None:
            pass

    with pytest.raises(StopError):
        convert_checkpoint(source, tmp_path / "out", to="espalier", progress=Impatient())
    assert not (tmp_path / "out").exists()


def test_progress_adds_up(tmp_path: Path) -> None:
    source = draft_with().write(tmp_path / "exl3")
    events: list[tuple[str, int]] = []

    class Recorder:
        def start(self, total_bytes: int, label: str) -> None:
            events.append((label, total_bytes))

        def advance(self, n_bytes: int) -> None:
            events.append(("advance", n_bytes))

        def finish(self) -> None:
            events.append(("finish", 0))

    convert_checkpoint(source, tmp_path / "out", to="espalier", progress=Recorder())
    assert events[0][0] == "converting"
    assert events[-1][0] == "finish"
    assert sum(count for event, count in events if event == "advance") == events[0][1]


def test_single_file_and_wrong_format(qmoe_exl3: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="folder"):
        convert_checkpoint(qmoe_exl3 / "model.safetensors", tmp_path / "out", to="espalier")
    with (
        open_checkpoint(qmoe_exl3 / "model.safetensors") as lone,
        pytest.raises(SourceError, match="single file"),
    ):
        exl3_to_espalier(lone, tmp_path / "out")
    convert_checkpoint(qmoe_exl3, tmp_path / "espalier", to="espalier")
    with open_checkpoint(tmp_path / "espalier") as espalier, pytest.raises(SourceError, match="espalier"):
        exl3_to_espalier(espalier, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("projection", ["", "x\x01"])
def test_schema_error_for_experts_whose_names_a_config_cannot_hold(projection: str, tmp_path: Path) -> None:
    draft = draft_with([Exl3Module(f"m.experts.0.{projection}", 128, 128)])
    with pytest.raises(SchemaError, match="a config cannot hold the name"):
        convert_checkpoint(draft.write(tmp_path / "source"), tmp_path / "out", to="espalier")
    assert not (tmp_path / "out").exists()


def test_a_tensor_name_cannot_make_up_a_line_of_the_list() -> None:
    entry = ("s", "a", "F16", (2,))
    forged = ("s", "a\tF16\t2\ns\tb", "F16", (2,))
    assert tensor_list_sha256([forged]) != tensor_list_sha256([entry, ("s", "b", "F16", (2,))])
    assert tensor_list_sha256([("s", "a\\t", "F16", ())]) != tensor_list_sha256([("s", "a\t", "F16", ())])


def test_what_finder_leaves_beside_a_shard_is_carried_along(tmp_path: Path) -> None:
    draft = draft_with()
    draft.files["._model.safetensors"] = b"AppleDouble"
    folder, _, _ = converted(draft, tmp_path)
    assert (folder / "._model.safetensors").read_bytes() == b"AppleDouble"
    with open_checkpoint(folder) as checkpoint:
        assert [shard.name for shard in checkpoint.shards] == ["model.safetensors"]
