"""Opening EXL3 checkpoints: real ones, synthetic ones of every kind, and broken ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import INDEX, Draft, Exl3Module, Tensor, bf16, exl3_draft, llama_config, llama_modules

from espalier_format.checkpoint import open_checkpoint
from espalier_format.errors import (
    CodebookError,
    DtypeError,
    DuplicateTensorError,
    EspalierError,
    LimitError,
    MissingFileError,
    MissingTensorError,
    NonFiniteScaleError,
    PathError,
    ShapeError,
    SourceError,
    UnexpectedTensorError,
)

Q = "model.layers.0.self_attn.q_proj"


def llama_draft(num_shards: int = 1, **how: Any) -> Draft:
    modules = [Exl3Module(*sizes, **how) for sizes in llama_modules()]
    return exl3_draft(modules, config=llama_config(), num_shards=num_shards)


@pytest.fixture
def draft() -> Draft:
    return llama_draft()


def refused(draft: Draft, folder: Path, kind: type[EspalierError]) -> str:
    draft.write(folder)
    with pytest.raises(EspalierError) as caught:
        open_checkpoint(folder)
    assert type(caught.value) is kind
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_a_real_llama(llama_exl3: Path) -> None:
    with open_checkpoint(llama_exl3) as checkpoint:
        assert checkpoint.format == "exl3"
        assert checkpoint.quantization is None
        assert len(checkpoint.modules) == 15
        assert len(checkpoint.tensors) == 66
        assert checkpoint.warnings == ()
        head = checkpoint.modules["lm_head"]
        assert (head.in_features, head.out_features, head.padded_out, head.size_source) == (512, 320, 384, "exact")
        assert head.codebook.name == "exl3-mcg@6"
        assert checkpoint.modules["model.layers.1.mlp.up_proj"].codebook.name == "exl3-mcg@3"
        assert checkpoint.other_files == (
            "generation_config.json",
            "quantization_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        )
        assert list(checkpoint.plain) == [
            "model.embed_tokens.weight",
            "model.layers.0.input_layernorm.weight",
            "model.layers.0.post_attention_layernorm.weight",
            "model.layers.1.input_layernorm.weight",
            "model.layers.1.post_attention_layernorm.weight",
            "model.norm.weight",
        ]


def test_a_real_mixture_of_experts(qmoe_exl3: Path) -> None:
    with open_checkpoint(qmoe_exl3) as checkpoint:
        assert len(checkpoint.modules) == 168
        assert len(checkpoint.expert_banks) == 5
        bank = checkpoint.expert_banks["model.language_model.layers.2.mlp.experts"]
        assert bank.num_experts == 8
        assert set(bank.projections) == {"gate_proj", "up_proj", "down_proj"}
        assert all(name in checkpoint.modules for names in bank.projections.values() for name in names if name)
        assert checkpoint.modules["model.visual.merger.linear_fc1"].bias is not None
        assert checkpoint.modules["mtp.fc"].codebook.name == "exl3-mul1@3"
        assert "model.visual.blocks.0.attn.qkv.weight" in checkpoint.plain
        assert {module.size_source for module in checkpoint.modules.values()} == {"exact"}
        assert checkpoint.warnings == ()


def test_a_lone_file(fixtures: Path) -> None:
    with open_checkpoint(fixtures / "exl3" / "kat.safetensors") as checkpoint:
        assert checkpoint.format == "exl3"
        assert checkpoint.modules["mul1.k1.5"].codebook.name == "exl3-mul1@1.5"
        assert checkpoint.modules["3inst.k4"].codebook.name == "exl3-3inst@4"
        assert checkpoint.config == {}
        assert checkpoint.other_files == ()
        # Neither config nor architecture: the sizes are those stored, and a warning says so.
        assert {module.size_source for module in checkpoint.modules.values()} == {"padded"}
        assert len(checkpoint.warnings) == 1


@pytest.mark.parametrize("num_shards", [1, 3])
def test_true_sizes_and_bias(tmp_path: Path, num_shards: int) -> None:
    draft = llama_draft(num_shards, bias="F16")
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        assert checkpoint.warnings == ()
        down = checkpoint.modules["model.layers.0.mlp.down_proj"]
        assert (down.in_features, down.out_features, down.padded_in, down.padded_out) == (320, 192, 384, 256)
        assert down.size_source == "exact"
        assert down.size_how
        assert down.bias is not None
        assert down.bias.shape == (256,)
        assert down.marker is not None
        assert list(checkpoint.tensors) == draft.names()


@pytest.mark.parametrize("dtype", ["F16", "F32", "BF16"])
@pytest.mark.parametrize("unpadded", [False, True])
def test_a_bias_of_either_length(tmp_path: Path, dtype: str, unpadded: bool) -> None:
    draft = llama_draft(bias=dtype, unpadded_bias=unpadded)
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        bias = checkpoint.modules[Q].bias
        assert bias is not None
        assert bias.shape == ((192,) if unpadded else (256,))


@pytest.mark.parametrize(("packed_su", "packed_sv"), [(True, True), (True, False), (False, True)])
def test_legacy_signs(tmp_path: Path, packed_su: bool, packed_sv: bool) -> None:
    full = llama_draft()
    draft = llama_draft(packed_su=packed_su, packed_sv=packed_sv)
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        module = checkpoint.modules[Q]
        assert (module.packed_su, module.packed_sv) == (packed_su, packed_sv)
        for scale, kind, packed in zip(module.scales(), ("suh", "svh"), (packed_su, packed_sv), strict=True):
            stored = full[f"{Q}.{kind}"].array()
            assert scale.dtype == np.float16
            expected = np.where(stored < 0, -1, 1).astype(np.float16) if packed else stored
            assert scale.tobytes() == expected.tobytes()


def test_no_marker_means_3inst(tmp_path: Path) -> None:
    with open_checkpoint(llama_draft(bits=3, marker=None).write(tmp_path)) as checkpoint:
        assert checkpoint.modules[Q].codebook.name == "exl3-3inst@3"
        assert checkpoint.modules[Q].marker is None


@pytest.mark.parametrize("bits", [1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8])
def test_all_widths(tmp_path: Path, bits: float) -> None:
    with open_checkpoint(llama_draft(bits=bits, marker="mul1").write(tmp_path)) as checkpoint:
        assert checkpoint.modules[Q].codebook.name == f"exl3-mul1@{bits:g}"


def test_a_config_without_the_block(tmp_path: Path, draft: Draft) -> None:
    draft.config = llama_config()
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        assert checkpoint.format == "exl3"


def test_another_method_wins_over_the_tensors(tmp_path: Path, draft: Draft) -> None:
    draft.config = {"quantization_config": {"quant_method": "other"}}
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        assert checkpoint.format == "plain"
        assert "'other', which is not read" in checkpoint.warnings[0]


def test_a_folder_without_shards(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "exl3"}}')
    with pytest.raises(SourceError):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("value", [0, 0x83DCD12D, 0xCBAC1FEC])
def test_a_marker_of_another_value(tmp_path: Path, draft: Draft, value: int) -> None:
    draft[f"{Q}.mcg"].data = struct.pack("<I", value)
    line = refused(draft, tmp_path, CodebookError)
    assert f"0x{value:08X}" in line
    assert f"{Q}.mcg" in line


def test_both_markers(tmp_path: Path, draft: Draft) -> None:
    draft[f"{Q}.mul1"] = Tensor("I32", (), struct.pack("<I", 0x83DCD12D))
    refused(draft, tmp_path, CodebookError)


@pytest.mark.parametrize(("dtype", "shape", "kind"), [("F32", (), DtypeError), ("I32", (1,), ShapeError)])
def test_a_marker_of_another_form(
    tmp_path: Path, draft: Draft, dtype: str, shape: tuple[int, ...], kind: type[EspalierError]
) -> None:
    draft[f"{Q}.mcg"].dtype = dtype
    draft[f"{Q}.mcg"].shape = shape
    refused(draft, tmp_path, kind)


@pytest.mark.parametrize("marker", [None, "mcg"])
def test_a_half_rate_needs_mul1(tmp_path: Path, marker: str | None) -> None:
    refused(llama_draft(bits=2.5, marker=marker), tmp_path, CodebookError)


@pytest.mark.parametrize("words", [0, 8, 20, 33, 72, 144])
def test_a_width_that_does_not_exist(tmp_path: Path, draft: Draft, words: int) -> None:
    draft[f"{Q}.trellis"] = Tensor("I16", (16, 16, words), bytes(512 * words))
    refused(draft, tmp_path, ShapeError)


@pytest.mark.parametrize("shape", [(16, 4, 32), (4, 16, 32), (0, 16, 32), (16, 0, 32), (16, 16, 2, 16), (8192,), ()])
def test_a_trellis_of_another_shape(tmp_path: Path, draft: Draft, shape: tuple[int, ...]) -> None:
    draft[f"{Q}.trellis"] = Tensor("I16", shape, bytes(2 * int(np.prod(shape))))
    refused(draft, tmp_path, ShapeError)


@pytest.mark.parametrize(
    ("name", "tensor", "kind"),
    [
        ("trellis", Tensor("F16", (16, 16, 32), bytes(16384)), DtypeError),
        ("suh", Tensor("BF16", (256,), bytes(512)), DtypeError),
        ("svh", Tensor("I16", (256,), bytes(512)), DtypeError),
        ("suh", Tensor("F16", (192,), bytes(384)), ShapeError),
        ("svh", Tensor("F16", (1, 256), bytes(512)), ShapeError),
        ("bias", Tensor("I32", (256,), bytes(1024)), DtypeError),
        ("bias", Tensor("F16", (128,), bytes(256)), ShapeError),
        ("scale", Tensor("F16", (256,), bytes(512)), UnexpectedTensorError),
        ("su", Tensor("I16", (16,), bytes(32)), UnexpectedTensorError),
        ("sv", Tensor("I16", (16,), bytes(32)), UnexpectedTensorError),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, draft: Draft, name: str, tensor: Tensor, kind: type[EspalierError]
) -> None:
    draft[f"{Q}.{name}"] = tensor
    assert f"{Q}.{name}" in refused(draft, tmp_path, kind)


@pytest.mark.parametrize("tensor", [Tensor("F16", (16,), bytes(32)), Tensor("I16", (8,), bytes(16))])
def test_legacy_signs_that_do_not_fit(tmp_path: Path, tensor: Tensor) -> None:
    draft = llama_draft(packed_su=True)
    draft[f"{Q}.su"] = tensor
    refused(draft, tmp_path, DtypeError if tensor.dtype == "F16" else ShapeError)


@pytest.mark.parametrize("name", ["suh", "svh", "trellis"])
def test_a_missing_tensor(tmp_path: Path, draft: Draft, name: str) -> None:
    del draft[f"{Q}.{name}"]
    refused(draft, tmp_path, MissingTensorError)


def test_a_row_table_is_carried(tmp_path: Path, draft: Draft) -> None:
    draft["model.embed_tokens.trellis"] = Tensor("I16", (90, 33), bytes(5940))
    draft["model.embed_tokens.signs"] = Tensor("F16", (1, 256), bytes(512))
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        assert {"model.embed_tokens.trellis", "model.embed_tokens.signs"} <= set(checkpoint.plain)
        assert len(checkpoint.modules) == 7


def test_an_infinite_scale_is_found_when_it_is_read(tmp_path: Path, draft: Draft) -> None:
    """Opening reads no scales; the error names the position."""
    for value in (np.inf, -np.inf, np.nan):
        scales = draft[f"{Q}.suh"].array().copy()
        scales[17] = value
        draft[f"{Q}.suh"] = Tensor.of(scales, "F16")
        with open_checkpoint(draft.write(tmp_path)) as checkpoint, pytest.raises(NonFiniteScaleError, match="scale 17"):
            checkpoint.modules[Q].scales()


def test_equal_duplicates_are_a_warning(tmp_path: Path) -> None:
    draft = llama_draft(num_shards=2)
    first, second = draft.shards.values()
    second["model.embed_tokens.weight"] = first["model.embed_tokens.weight"]
    draft.index = None
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        assert "stored twice" in checkpoint.warnings[0]
        assert checkpoint.tensors["model.embed_tokens.weight"].shard.name == "model-00001-of-00002.safetensors"


@pytest.mark.parametrize("fault", ["bytes", "dtype", "shape"])
def test_differing_duplicates_are_refused(tmp_path: Path, fault: str) -> None:
    draft = llama_draft(num_shards=2)
    first, second = draft.shards.values()
    tensor = first["model.embed_tokens.weight"]
    other = {
        "bytes": Tensor(tensor.dtype, tensor.shape, tensor.data[:-1] + bytes([tensor.data[-1] ^ 1])),
        "dtype": Tensor("F16", tensor.shape, tensor.data),
        "shape": Tensor(tensor.dtype, tensor.shape[::-1], tensor.data),
    }
    second["model.embed_tokens.weight"] = other[fault]
    refused(draft, tmp_path, DuplicateTensorError)


@pytest.mark.parametrize("index", ["stale", "no shard", "malformed", "no map"])
def test_the_index_only_warns(tmp_path: Path, index: str) -> None:
    draft = llama_draft(num_shards=2)
    draft.index = draft.right_index()
    if index == "stale":
        del draft.index["weight_map"][f"{Q}.suh"]
    elif index == "no shard":
        draft.index["weight_map"]["x"] = "model-00003-of-00003.safetensors"
    elif index == "no map":
        draft.index = {}
    draft.write(tmp_path)
    if index == "malformed":
        (tmp_path / INDEX).write_text("{")
    with open_checkpoint(tmp_path) as checkpoint:
        assert INDEX in checkpoint.warnings[0]
        assert "shard headers are used" in checkpoint.warnings[0]
        assert len(checkpoint.modules) == 7


HALF = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("index", ["right", "none", "malformed"])
@pytest.mark.parametrize("gone", ["model-00001-of-00002.safetensors", HALF])
def test_half_a_download_is_refused(tmp_path: Path, index: str, gone: str) -> None:
    draft = llama_draft(num_shards=2)
    if index == "none":
        draft.index = None
    draft.write(tmp_path)
    (tmp_path / gone).unlink()
    if index == "malformed":
        (tmp_path / INDEX).write_text("{")
    named = f"{INDEX} names {gone}, which is" if index == "right" else f"{gone} is"
    with pytest.raises(MissingFileError) as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value) == f"{tmp_path}: {named} not there (1 of 2 shards); is the download complete?"


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        ("m-00001-of-00001", None),
        ("m-00000-of-00001", None),
        ("m-00000-of-00002", "m-00001-of-00002"),
        ("m-00001-of-000163", "m-00002-of-000163"),
        ("m-00001-of-99999999", "m-00002-of-99999999"),
        ("m-00001-of-00000", None),
        ("m-1-of-2", None),
    ],
)
def test_numbers_of_shards(tmp_path: Path, draft: Draft, present: str, missing: str | None) -> None:
    """As writers spell them; a total that is out of this world costs nothing."""
    draft.shards = {f"{present}.safetensors": draft.shards.popitem()[1]}
    draft.write(tmp_path)
    if missing is None:
        open_checkpoint(tmp_path).close()
    else:
        with pytest.raises(MissingFileError, match=f"{missing}.safetensors is not there"):
            open_checkpoint(tmp_path)


def test_a_module_that_only_the_index_has(tmp_path: Path, draft: Draft) -> None:
    """Whatever the shards are called: a trellis of the index must be there; a plain tensor, left over, need not."""
    draft.index = draft.right_index()
    draft.index["weight_map"]["model.layers.0.mlp.up_proj.weight"] = "other.safetensors"
    open_checkpoint(draft.write(tmp_path / "stale")).close()
    draft.index["weight_map"]["model.layers.9.mlp.up_proj.trellis"] = "model.safetensors"
    assert "lists model.layers.9.mlp.up_proj.trellis" in refused(draft, tmp_path / "tensor", MissingFileError)
    draft.index["weight_map"]["model.layers.9.mlp.up_proj.trellis"] = "second.safetensors"
    assert "names second.safetensors, which is not there" in refused(draft, tmp_path / "shard", MissingFileError)


def test_an_index_that_is_right_shows_that_nothing_is_missing(tmp_path: Path) -> None:
    """A shard that held nothing of its own is left out of a conversion, and its number then is missing."""
    draft = llama_draft(num_shards=2)
    first, _ = draft.shards
    draft.shards = {first: {name: tensor for held in draft.shards.values() for name, tensor in held.items()}}
    open_checkpoint(draft.write(tmp_path)).close()


def test_an_index_that_leads_out_is_refused(tmp_path: Path) -> None:
    draft = llama_draft(num_shards=2)
    draft.index = draft.right_index()
    draft.index["weight_map"]["x"] = "../model.safetensors"
    refused(draft, tmp_path, PathError)


STORAGE_FAULTS = [
    ("shape", [16, 16, 16], "has shape [16, 16, 32], not [16, 16, 16]"),
    ("dtype", "torch.float16", "has dtype I16, not torch.float16"),
    ("dtype", ["x"], "has dtype I16"),
    ("n_bytes", 3, "has 16384 bytes, not 3"),
]


@pytest.mark.parametrize(("field", "value", "message"), STORAGE_FAULTS)
def test_what_tensor_storage_says_about_a_tensor(
    tmp_path: Path, draft: Draft, field: str, value: object, message: str
) -> None:
    document = json.loads(draft.files["quantization_config.json"])
    document["tensor_storage"][Q]["stored_tensors"][f"{Q}.trellis"][field] = value
    draft.files["quantization_config.json"] = json.dumps(document).encode()
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        assert len(checkpoint.warnings) == 1
        assert message in checkpoint.warnings[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits_per_weight": 3}, f"{Q} has 2 bits per weight, not 3"),
        ({"mcg_multiplier": 1}, f"{Q} has the mcg multiplier 3417055213, not 1"),
        ({"mul1_multiplier": 2212286765}, f"{Q} has no mul1 codebook"),
        ({"stored_tensors": {"gone": {}}}, "no shard holds gone"),
        ({"stored_tensors": []}, f"{Q}.stored_tensors is no JSON object"),
    ],
)
def test_what_tensor_storage_says_about_a_module(
    tmp_path: Path, draft: Draft, change: dict[str, Any], message: str
) -> None:
    document = json.loads(draft.files["quantization_config.json"])
    document["tensor_storage"][Q].update(change)
    draft.files["quantization_config.json"] = json.dumps(document).encode()
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        assert message in checkpoint.warnings[0]


def test_half_rates_rounded_down_by_old_versions_are_no_disagreement(tmp_path: Path) -> None:
    draft = llama_draft(bits=2.5, marker="mul1")
    document = json.loads(draft.files["quantization_config.json"])
    document["tensor_storage"][Q]["bits_per_weight"] = 2
    draft.files["quantization_config.json"] = json.dumps(document).encode()
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        assert checkpoint.warnings == ()


def test_many_disagreements_are_one_line(tmp_path: Path, draft: Draft) -> None:
    document = {"tensor_storage": {f"x{number}": 1 for number in range(500)}}
    draft.files["quantization_config.json"] = json.dumps(document).encode()
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        assert len(checkpoint.warnings) == 1
        assert "and 497 more" in checkpoint.warnings[0]
        assert len(checkpoint.warnings[0]) < 500


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff", b'{"tensor_storage": 3}', b'{"a": 1, "a": 2}'])
def test_a_malformed_quantization_config_json_is_a_warning(tmp_path: Path, draft: Draft, text: bytes) -> None:
    draft.files["quantization_config.json"] = text
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        assert "the file is not used" in checkpoint.warnings[0]


def test_its_limits_still_hold(tmp_path: Path, draft: Draft) -> None:
    draft.files["quantization_config.json"] = b"[" * 100 + b"]" * 100
    refused(draft, tmp_path, LimitError)


def expert_draft(*modules: Exl3Module, **plain: Tensor) -> Draft:
    return exl3_draft(modules, {name.replace("__", "."): tensor for name, tensor in plain.items()})


def test_experts_of_several_codebooks_are_one_bank(tmp_path: Path) -> None:
    modules = [Exl3Module(f"a.experts.{e}.w1", 128, 128, bits, "mul1") for e, bits in enumerate((2, 1.5, 2))]
    with open_checkpoint(expert_draft(*modules).write(tmp_path)) as checkpoint:
        assert checkpoint.expert_banks["a.experts"].projections == {"w1": tuple(module.name for module in modules)}


def test_a_plain_expert_is_part_of_the_bank(tmp_path: Path) -> None:
    modules = [Exl3Module(f"a.experts.{e}.w1", 128, 128) for e in (0, 2)]
    weight = bf16(np.zeros((128, 128)))
    with open_checkpoint(expert_draft(*modules, a__experts__1__w1__weight=weight).write(tmp_path)) as checkpoint:
        assert checkpoint.expert_banks["a.experts"].projections == {"w1": ("a.experts.0.w1", None, "a.experts.2.w1")}


@pytest.mark.parametrize(
    "others",
    [
        [Exl3Module("a.experts.2.w1", 128, 128)],
        [Exl3Module("a.experts.1.w1", 256, 128)],
        [Exl3Module("a.experts.01.w1", 128, 128), Exl3Module("a.experts.1.w2", 128, 128)],
        [Exl3Module("a.experts.999999999.w1", 128, 128)],
    ],
)
def test_experts_that_do_not_form_a_bank(tmp_path: Path, others: list[Exl3Module]) -> None:
    """A gap in the numbers, another size, another spelling: the modules stand alone, and none is lost."""
    modules = [Exl3Module("a.experts.0.w1", 128, 128), *others]
    with open_checkpoint(expert_draft(*modules).write(tmp_path)) as checkpoint:
        assert all("w1" not in bank.projections for bank in checkpoint.expert_banks.values())
        assert set(checkpoint.modules) == {module.name for module in modules}


def test_a_plain_expert_of_another_size_does_not_fit(tmp_path: Path) -> None:
    weight = bf16(np.zeros((128, 64)))
    draft = expert_draft(Exl3Module("a.experts.0.w1", 128, 128), a__experts__1__w1__weight=weight)
    with open_checkpoint(draft.write(tmp_path)) as checkpoint:
        assert checkpoint.expert_banks == {}


def test_experts_must_be_below_a_part_called_experts(tmp_path: Path) -> None:
    with open_checkpoint(expert_draft(Exl3Module("layers.0.w1", 128, 128)).write(tmp_path)) as checkpoint:
        assert checkpoint.expert_banks == {}
