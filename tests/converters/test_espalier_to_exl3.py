"""Espalier checkpoints that never were EXL3, or have been changed since, as EXL3.

What is written is read by json and the safetensors library and compared with the rules of EXL3. Not checked:
that exllamav3 loads it.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import (
    INDEX,
    MARKERS,
    Bank,
    Draft,
    Exl3Module,
    Module,
    Tensor,
    bf16,
    espalier_draft,
    exl3_draft,
    llama_config,
    llama_modules,
    read_safetensors,
    safetensors_bytes,
)

from espalier_format.checkpoint import open_checkpoint
from espalier_format.converters.espalier_to_exl3 import espalier_to_exl3
from espalier_format.errors import (
    LossyError,
    NonFiniteScaleError,
    OutputExistsError,
    SchemaError,
    SourceError,
    UnexpectedTensorError,
)
from espalier_format.operations.convert import convert_checkpoint

MANIFEST = "espalier_manifest.json"
Q, K, HEAD = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "lm_head"
MODULES = (
    Module(Q, 192, 192, "exl3-mcg@3", bias="BF16"),
    Module(K, 192, 64, "exl3-mul1@2.5", bias="F16"),
    Module("model.layers.0.self_attn.v_proj", 192, 64, "exl3-3inst@2", bias="F32"),
    Module(HEAD, 192, 90, "exl3-mcg@6"),
)
BANK = Bank(
    "model.layers.0.mlp.experts",
    {"gate_proj": (192, 64), "up_proj": (192, 64), "down_proj": (64, 192)},
    ("exl3-mul1@2",),
    "00",
    (128, 128),
)


def to_exl3(draft: Draft, work: Path) -> tuple[Path, tuple[str, ...]]:
    report = convert_checkpoint(draft.write(work / "espalier"), work / "exl3", to="exl3")
    return work / "exl3", report.warnings


def all_tensors(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in read_safetensors(path)[0].items()
    }


def test_tensors_of_a_checkpoint_that_was_never_exl3(tmp_path: Path) -> None:
    draft = espalier_draft(MODULES, (BANK,))
    folder, warnings = to_exl3(draft, tmp_path)
    assert warnings == ()
    found = all_tensors(folder)
    expected: dict[str, Tensor] = {}
    for name in draft.names():
        module, _, kind = name.rpartition(".")
        tensor = draft[name]
        if kind == "bias":
            size = -(-tensor.shape[0] // 128) * 128
            if tensor.dtype == "BF16":  # exact in F32, which EXL3 readers take
                bits = np.zeros(size, np.uint32)
                bits[: tensor.shape[0]] = tensor.array().astype(np.uint32) << 16
                tensor = Tensor.of(bits.view(np.float32), "F32")
            else:
                tensor = Tensor(
                    tensor.dtype, (size,), tensor.data.ljust(size * len(tensor.data) // tensor.shape[0], b"\0")
                )
        elif kind == "esp_trellis":
            codebook = next((m.codebook for m in MODULES if m.name == module), "exl3-mul1@2")
            marker = codebook.removeprefix("exl3-").partition("@")[0]
            if marker in MARKERS:
                expected[f"{module}.{marker}"] = Tensor("I32", (), struct.pack("<I", MARKERS[marker]))
        expected[name.replace(".esp_", ".")] = tensor
    assert found == expected
    assert list(found) == list(expected)  # suh, svh, bias, marker, trellis
    # As exllamav3 writes it: minified header, no metadata, no padding.
    assert (folder / "model.safetensors").read_bytes() == safetensors_bytes(expected, pad=False)


def test_documents_of_a_checkpoint_that_was_never_exl3(tmp_path: Path) -> None:
    folder, _ = to_exl3(espalier_draft(MODULES, (BANK,), config={"model_type": "x", "vocab_size": 90}), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    block = config.pop("quantization_config")
    assert config == {"architectures": ["LlamaForCausalLM"], "model_type": "x", "vocab_size": 90}
    experts = 2 * 3 * 192 * 64
    average = (3 * 192 * 192 + 4.5 * 192 * 64 + 2 * experts) / (192 * 192 + 2 * 192 * 64 + experts)
    assert block.pop("producer")["name"] == "espalier-format"
    assert block == {
        "quant_method": "exl3",
        "version": "1.6.5",
        "bits": round(average, 6),
        "head_bits": 6,
        "out_scales": "auto",
        "codebook": "mul1",
    }
    document = json.loads((folder / "quantization_config.json").read_text())
    storage = document.pop("tensor_storage")
    document.pop("producer")
    assert document == block
    assert storage[K] == {
        "stored_tensors": {
            f"{K}.suh": {"shape": [256], "n_bytes": 512, "dtype": "torch.float16"},
            f"{K}.svh": {"shape": [128], "n_bytes": 256, "dtype": "torch.float16"},
            f"{K}.bias": {"shape": [128], "n_bytes": 256, "dtype": "torch.float16"},
            f"{K}.mul1": {"shape": [], "n_bytes": 4, "dtype": "torch.int32"},
            f"{K}.trellis": {"shape": [16, 8, 40], "n_bytes": 10240, "dtype": "torch.int16"},
        },
        "quant_format": "exl3",
        "bits_per_weight": 2.5,
        "mul1_multiplier": MARKERS["mul1"],
    }
    assert set(storage) == {name.rpartition(".")[0] for name in all_tensors(folder)}
    assert "quant_format" not in storage["model.embed_tokens"]
    assert not (folder / INDEX).exists()


def test_result_opens_as_exl3_without_complaint(tmp_path: Path) -> None:
    folder, _ = to_exl3(espalier_draft(MODULES, (BANK,), num_shards=2, config=llama_config()), tmp_path)
    with open_checkpoint(folder) as exl3, open_checkpoint(tmp_path / "espalier") as espalier:
        assert exl3.format == "exl3"
        assert exl3.warnings == () or all("true size" in warning for warning in exl3.warnings)
        assert set(exl3.modules) == set(espalier.modules)
        for name, module in espalier.modules.items():
            assert exl3.modules[name].codebook == module.codebook
            assert bytes(exl3.modules[name].trellis.data()) == bytes(module.trellis.data())
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    assert set(weight_map) == set(all_tensors(folder))


def test_documents_equal_those_of_exllamav3(qmoe_exl3: Path, llama_exl3: Path, tmp_path: Path) -> None:
    """Forget where a checkpoint came from: tensor_storage must come out as exllamav3 wrote it."""
    for source in (qmoe_exl3, llama_exl3):
        espalier, back = tmp_path / source.name, tmp_path / f"{source.name}-back"
        convert_checkpoint(source, espalier, to="espalier")
        config = json.loads((espalier / "config.json").read_text())
        del config["quantization_config"]["source"]
        (espalier / "config.json").write_text(json.dumps(config))
        (espalier / "exl3_quantization_config.json").unlink()
        (espalier / "espalier_manifest.json").unlink()  # it tells that the two were changed
        convert_checkpoint(espalier, back, to="exl3")
        original = json.loads((source / "quantization_config.json").read_text())
        document = json.loads((back / "quantization_config.json").read_text())
        assert document["tensor_storage"] == original["tensor_storage"]
        same = ("quant_method", "bits", "head_bits", "codebook", "out_scales", "vision_bits", "mtp_bits")
        assert {key: document.get(key) for key in same} == {key: original.get(key) for key in same}
        assert (back / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_plain_head_is_stated_as_16_bits(tmp_path: Path) -> None:
    draft = espalier_draft(MODULES[:1], (), {"lm_head.weight": bf16(np.zeros((90, 192)))})
    folder, _ = to_exl3(draft, tmp_path)
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["head_bits"] == 16


@pytest.mark.parametrize(
    "module",
    [
        Module(Q, 192, 192, "e2m1@2"),
        Module(Q, 192, 192, "int5@3", (0, 0)),
        Module(Q, 192, 192, "exl3-mcg@3", (64, 128)),
        Module(Q, 192, 192, "exl3-mcg@3", (128, 0)),
        Module(Q, 192, 256, "exl3-mcg@3", (128, 256)),
    ],
)
def test_what_exl3_cannot_hold_is_refused(module: Module, tmp_path: Path) -> None:
    draft = espalier_draft((module, *MODULES[1:]), ())
    with pytest.raises(LossyError) as caught:
        to_exl3(draft, tmp_path)
    message = str(caught.value)
    assert f"{Q} ({module.codebook}, rotation {module.rotation[0]}/{module.rotation[1]})" in message
    assert "espalier-format quantize SRC DST --to exl3" in message
    assert not (tmp_path / "exl3").exists()


def test_refusal_lists_the_first_modules_only(tmp_path: Path) -> None:
    draft = espalier_draft(
        (), (Bank("x.experts", {"up_proj": (32, 32)}, assignment="0" * 30 + "12", rotation=(32, 32)),)
    )
    with pytest.raises(LossyError, match="32 of 32 modules") as caught:
        to_exl3(draft, tmp_path)
    assert "x.experts.2.up_proj" in str(caught.value)
    assert "x.experts.3.up_proj" not in str(caught.value)
    assert "29 more" in str(caught.value)


@pytest.mark.parametrize(
    ("codebooks", "assignment", "expected"),
    [
        (("exl3-mul1@2",), "00", []),
        (("exl3-mul1@2", "exl3-mul1@3"), "01", ["gate_proj has exl3-mul1@2, exl3-mul1@3"]),
        (("exl3-mcg@2", "exl3-mul1@2"), "01", ["gate_proj has exl3-mcg@2, exl3-mul1@2"]),
        (("exl3-mul1@2",), "0-", ["gate_proj has quantized and plain experts"]),
    ],
)
def test_what_exllamav3_does_not_load_is_a_warning(
    codebooks: tuple[str, ...], assignment: str, expected: list[str], tmp_path: Path
) -> None:
    bank = Bank("model.layers.0.mlp.experts", {"gate_proj": (128, 128)}, codebooks, assignment, (128, 128))
    _, warnings = to_exl3(espalier_draft((), (bank,)), tmp_path)
    assert len(warnings) == len(expected)
    assert all(part in warnings[0] and "exllamav3" in warnings[0] for part in expected)


def test_gate_and_up_of_different_width_are_a_warning(tmp_path: Path) -> None:
    modules = [
        Exl3Module(f"model.layers.0.mlp.experts.{n}.{name}", 128, 128, bits)
        for n in (0, 1)
        for name, bits in (("gate_proj", 2), ("up_proj", 3), ("down_proj", 4))
    ]
    convert_checkpoint(exl3_draft(modules).write(tmp_path / "0"), tmp_path / "1", to="espalier")
    report = convert_checkpoint(tmp_path / "1", tmp_path / "2", to="exl3")
    assert len(report.warnings) == 1
    assert "model.layers.0.mlp.experts has gate_proj at 2 bits and up_proj at 3" in report.warnings[0]


@pytest.mark.parametrize("kind", ["mcg", "mul1", "suh", "sv", "scale"])
def test_plain_tensor_in_the_way_is_refused(kind: str, tmp_path: Path) -> None:
    draft = espalier_draft(MODULES, ())
    draft[f"{Q}.{kind}"] = Tensor.of(np.zeros(3), "F16")
    with pytest.raises(UnexpectedTensorError, match=f"{Q}.{kind}"):
        to_exl3(draft, tmp_path)
    assert not (tmp_path / "exl3").exists()


def test_non_finite_scale_writes_nothing(tmp_path: Path) -> None:
    draft = espalier_draft(MODULES, ())
    values = draft[f"{K}.esp_svh"].array().copy()
    values[3] = np.inf
    draft[f"{K}.esp_svh"] = Tensor.of(values, "F16")
    with pytest.raises(NonFiniteScaleError):
        to_exl3(draft, tmp_path)
    assert not (tmp_path / "exl3").exists()


def test_existing_output_is_kept(tmp_path: Path) -> None:
    (tmp_path / "exl3").mkdir()
    (tmp_path / "exl3" / "mine").write_text("x")
    with pytest.raises(OutputExistsError):
        to_exl3(espalier_draft(MODULES, ()), tmp_path)


def test_exl3_is_no_source(llama_exl3: Path, tmp_path: Path) -> None:
    with open_checkpoint(llama_exl3) as checkpoint, pytest.raises(SourceError):
        espalier_to_exl3(checkpoint, tmp_path / "out")


# Checkpoints that came from EXL3 and have been changed since.


def imported(work: Path, **options: Any) -> tuple[Path, Draft]:
    """An Espalier checkpoint from EXL3, and what its shards and config hold, to be changed and written again."""
    modules = [Exl3Module(*shape, **options) for shape in llama_modules()] + [Exl3Module(HEAD, 192, 90, 6)]
    source = exl3_draft(modules, num_shards=2, config=llama_config(tie_word_embeddings=True)).write(work / "original")
    convert_checkpoint(source, work / "espalier", to="espalier")
    shards, metadata = {}, {}
    for path in sorted((work / "espalier").glob("*.safetensors")):
        shards[path.name], stated = read_safetensors(path)
        if stated:
            metadata[path.name] = stated
    config = json.loads((work / "espalier" / "config.json").read_text())
    carried = {path.name: path.read_bytes() for path in (work / "espalier").glob("exl3_*")}
    return source, Draft(config, shards, metadata, files=carried)


def test_removed_module_makes_the_documents_anew(tmp_path: Path) -> None:
    source, draft = imported(tmp_path)
    for kind in ("suh", "svh", "trellis"):
        del draft[f"{Q}.esp_{kind}"]
    del draft.block["modules"][Q]
    report = convert_checkpoint(draft.write(tmp_path / "changed"), tmp_path / "back", to="exl3")
    assert sorted(report.warnings) == [
        f"{INDEX} is made anew to describe the tensors",
        "quantization_config.json is made anew to describe the tensors",
        "the tensors are not those of the EXL3 checkpoint that this one came from",
    ]
    back = all_tensors(tmp_path / "back")
    assert back == {name: tensor for name, tensor in all_tensors(source).items() if not name.startswith(f"{Q}.")}
    weight_map = json.loads((tmp_path / "back" / INDEX).read_text())["weight_map"]
    assert set(weight_map) == set(back)
    document = json.loads((tmp_path / "back" / "quantization_config.json").read_text())
    assert Q not in document["tensor_storage"]
    assert K in document["tensor_storage"]
    original = json.loads((source / "config.json").read_text())
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == original
    with open_checkpoint(tmp_path / "back") as checkpoint:
        assert checkpoint.warnings == ()


def test_scales_that_are_no_signs_any_more_are_kept_in_full(tmp_path: Path) -> None:
    _, draft = imported(tmp_path, packed_su=True)
    values = draft[f"{Q}.esp_suh"].array().copy()
    values[5] *= 2
    draft[f"{Q}.esp_suh"] = Tensor.of(values, "F16")
    report = convert_checkpoint(draft.write(tmp_path / "changed"), tmp_path / "back", to="exl3")
    back = all_tensors(tmp_path / "back")
    assert back[f"{Q}.suh"].data == values.tobytes()
    assert f"{Q}.su" not in back
    assert back[f"{K}.su"].dtype == "I16"
    assert f"{Q}.su is not written as packed signs, since its scales are no longer +1 and -1" in report.warnings
    storage = json.loads((tmp_path / "back" / "quantization_config.json").read_text())["tensor_storage"]
    assert f"{Q}.suh" in storage[Q]["stored_tensors"]


def test_config_edited_since_is_kept(tmp_path: Path) -> None:
    source, draft = imported(tmp_path)
    assert draft.config is not None
    assert draft.config["tie_word_embeddings"] is False
    draft.config |= {"max_position_embeddings": 7, "tie_word_embeddings": "edited"}
    report = convert_checkpoint(draft.write(tmp_path / "changed"), tmp_path / "back", to="exl3")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    original = json.loads((source / "config.json").read_text())
    assert config == {**original, "max_position_embeddings": 7, "tie_word_embeddings": "edited"}
    assert report.warnings == ()


def test_missing_carried_file_is_reported(tmp_path: Path) -> None:
    _, draft = imported(tmp_path)
    draft.files.clear()
    report = convert_checkpoint(draft.write(tmp_path / "changed"), tmp_path / "back", to="exl3")
    assert set(report.warnings) == {
        "quantization_config.json cannot be restored: exl3_quantization_config.json is missing",
        f"{INDEX} cannot be restored: exl3_{INDEX} is missing",
    }
    weight_map = json.loads((tmp_path / "back" / INDEX).read_text())["weight_map"]
    assert set(weight_map) == set(all_tensors(tmp_path / "back"))


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"weight_map": 3}', b'{"weight_map": {"a": "b"}}'])
def test_spoilt_carried_index_is_not_restored(content: bytes, tmp_path: Path) -> None:
    _, draft = imported(tmp_path)
    draft.files[f"exl3_{INDEX}"] = content
    report = convert_checkpoint(draft.write(tmp_path / "changed"), tmp_path / "back", to="exl3")
    assert report.warnings == (f"{INDEX} is made anew to describe the tensors",)
    weight_map = json.loads((tmp_path / "back" / INDEX).read_text())["weight_map"]
    assert set(weight_map) == set(all_tensors(tmp_path / "back"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_config", {"quant_method": "espalier"}),
        ("quantization_config", {"quant_method": ["exl3"]}),
        ("replaced_config", {"tie_word_embeddings": {"x": [1]}}),
        ("replaced_config", {"tie_word_embeddings": 1}),
        ("replaced_config", {"text_config.tie_word_embeddings": False}),
        ("replaced_config", {"quantization_config": {}}),
        ("replaced_config", {"architectures": True}),
    ],
)
def test_what_exl3_cannot_have_had_is_not_restored(key: str, value: object, tmp_path: Path) -> None:
    _, draft = imported(tmp_path)
    draft.block["source"][key] = value
    with pytest.raises(SchemaError, match=f"source.{key}"):
        convert_checkpoint(draft.write(tmp_path / "changed"), tmp_path / "back", to="exl3")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "Config.JSON",
        "model-00001-of-00002.safetensors",
        "x.SafeTensors",
        MANIFEST,
        f"{MANIFEST}.sig",
        ".bashrc",
        "sub/.x",
        "CON",
        "aux.txt",
        "sub/lpt1",
    ],
)
def test_carried_file_with_the_name_of_another_output_is_refused(name: str, tmp_path: Path) -> None:
    _, draft = imported(tmp_path)
    draft.block["source"]["carried_files"] = {name: "exl3_quantization_config.json"}
    with pytest.raises(SchemaError, match="carried_files"):
        convert_checkpoint(draft.write(tmp_path / "changed"), tmp_path / "back", to="exl3")
    assert not (tmp_path / "back").exists()
