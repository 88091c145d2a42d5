"""The four kinds of published checkpoints, small: opened, decoded, and converted to plain weights.

They are packed by the real library from a Qwen3.5-MoE that transformers made. That a runtime loads the packed form is
not checked.
"""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import transformers
from builders import Tensor, read_safetensors
from compressed_tensors_cases import (
    FILES,
    LAYERS,
    LAYOUTS,
    Packed,
    args,
    build,
    from_torch,
    gptq,
    model,
    one_module,
    to_torch,
)

from espalier_format.checkpoint import open_checkpoint
from espalier_format.converters.to_hf import to_hf
from espalier_format.errors import IndexMismatchError, MissingFileError, OutputExistsError, SourceError, WriteError
from espalier_format.operations.convert import convert_checkpoint
from espalier_format.progress import NullProgress


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compressed-tensors") / "original"


@pytest.fixture(scope="session")
def packed(original: Path) -> dict[str, Packed]:
    return {name: build(original, layout()) for name, layout in LAYOUTS.items()}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.capability("compressed-tensors", "weights are the library's, bit for bit")
def test_every_module_decodes_to_the_bits_of_the_library(name: str, packed: dict[str, Packed], tmp_path: Path) -> None:
    case = packed[name]
    with open_checkpoint(case.draft.write(tmp_path)) as checkpoint:
        assert checkpoint.format == "compressed-tensors"
        assert checkpoint.packed.keys() == case.expected.keys()
        assert checkpoint.modules == {}
        for module, expected in case.expected.items():
            found = checkpoint.packed[module]
            assert found.scheme.group == case.groups[module]
            assert found.rows(0, found.out_features).tobytes() == expected.data, module
        assert not any(name.rpartition(".")[2].startswith("weight_") for name in checkpoint.plain)


def test_the_layouts_are_what_they_should_be(packed: dict[str, Packed], tmp_path: Path) -> None:
    """Counts, so that an expression which matches nothing cannot make a test pass."""
    linear = sum(kind == "linear_attention" for kind in LAYERS)
    experts = 3 * 4 * len(LAYERS)
    for name, pairs, head in (("gptq", 0, True), ("awq", linear, False), ("autoround", 0, False)):
        modules = packed[name].expected
        assert sum(".experts." in module for module in modules) == experts
        assert sum(module.endswith("in_proj_a") for module in modules) == pairs
        assert sum(module.endswith("in_proj_b") for module in modules) == pairs
        assert ("lm_head" in modules) is head
        assert not any("visual" in module or module.startswith("mtp") for module in modules)
    with open_checkpoint(packed["mixed"].draft.write(tmp_path)) as checkpoint:
        labels = {name: module.scheme.label for name, module in checkpoint.packed.items()}
        packings = {checkpoint.packed[name].packing is None for name in labels if "self_attn" in name}
        bank = checkpoint.expert_banks["model.language_model.layers.2.mlp.experts"]
    assert packings == {True}  # int8 that is not packed
    assert sorted({label for name, label in labels.items() if ".experts." in name}) == ["int4 g32", "int8 g128"]
    assert {label for name, label in labels.items() if "self_attn" in name} == {"int8 channel"}
    assert {int(name.split(".")[3]) for name in labels} == {2, 3}
    assert [labels[name] for name in bank.projections["up_proj"] if name is not None] == [
        "int4 g32", "int8 g128", "int4 g32", "int4 g32"]  # fmt: skip


def test_the_order_of_groups_does_not_matter(original: Path, packed: dict[str, Packed], tmp_path: Path) -> None:
    swapped = build(original, gptq(swapped=True))
    assert list(swapped.draft.config["quantization_config"]["config_groups"]) == ["group_1", "group_0"]  # type: ignore[index]
    for number, case in enumerate((packed["gptq"], swapped)):
        with open_checkpoint(case.draft.write(tmp_path / str(number))) as checkpoint:
            head = checkpoint.packed["lm_head"]
            assert head.scheme.label == "int8 g128"
            assert head.rows(0, head.out_features).tobytes() == case.expected["lm_head"].data


@pytest.mark.parametrize("name", LAYOUTS)
def test_conversion_gives_the_model_back_with_decoded_weights(
    name: str, original: Path, packed: dict[str, Packed], tmp_path: Path
) -> None:
    case, output = packed[name], tmp_path / "hf"
    report = convert_checkpoint(case.draft.write(tmp_path / "packed"), output, to="hf")
    config, tensors = model(original)
    written, metadata = read_safetensors(output / "model.safetensors")
    assert metadata == {"format": "pt"}
    assert written.keys() == tensors.keys()
    assert {"mtp.fc.weight", "model.visual.blocks.0.attn.qkv.weight"} <= written.keys()
    for tensor, before in tensors.items():
        assert written[tensor] == case.expected.get(tensor.removesuffix(".weight"), before), tensor
    assert json.loads((output / "config.json").read_text()) == config
    for file, content in FILES.items():
        assert (output / file).read_bytes() == content
    assert (report.source_format, report.target_format, report.modules) == (
        "compressed-tensors",
        "hf",
        len(case.expected),
    )


def test_transformers_loads_what_was_written(packed: dict[str, Packed], tmp_path: Path) -> None:
    case, output = packed["mixed"], tmp_path / "hf"
    convert_checkpoint(case.draft.write(tmp_path / "packed"), output, to="hf")
    auto = transformers.AutoModelForImageTextToText
    loaded, info = auto.from_pretrained(output, output_loading_info=True)
    assert [key for key, found in info.items() if found] == []
    state = loaded.state_dict()
    attention = "model.language_model.layers.3.self_attn.q_proj"
    assert from_torch(state[f"{attention}.weight"]) == case.expected[attention]
    bank = "model.language_model.layers.2.mlp.experts"
    gate_up = state[f"{bank}.gate_up_proj"]
    for expert in range(4):
        gate, up = (to_torch(case.expected[f"{bank}.{expert}.{part}_proj"]) for part in ("gate", "up"))
        assert gate_up[expert, :128].equal(gate)
        assert gate_up[expert, 128:].equal(up)


def test_the_default_dtype_is_the_scale_s_and_others_are_casts_of_it(tmp_path: Path) -> None:
    import torch
    from compressed_tensors_cases import compress

    weight = torch.randn((40, 64), generator=torch.Generator().manual_seed(2))
    tensors, expected = compress(weight, args(4, 32), "pack-quantized")
    draft = one_module({**tensors, "bias": from_torch(torch.ones(40, dtype=torch.bfloat16))}, {
        "num_bits": 4, "strategy": "group", "group_size": 32})  # fmt: skip
    assert draft.config is not None
    draft.config |= {"dtype": "bfloat16", "model_type": "llama"}
    source = draft.write(tmp_path / "packed")
    for dtype, stored in ((None, "F32"), ("bf16", "BF16"), ("fp16", "F16")):
        convert_checkpoint(source, tmp_path / str(dtype), to="hf", dtype=dtype)  # type: ignore[arg-type]
        written = read_safetensors(tmp_path / str(dtype) / "model.safetensors")[0]
        assert sorted(written) == ["m.bias", "m.weight"]
        kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
        assert written["m.weight"] == from_torch(to_torch(expected).to(kinds[stored]))
        assert written["m.bias"].dtype == ("BF16" if dtype is None else stored)


@pytest.mark.parametrize("to", ["espalier", "exl3"])
def test_integers_are_no_trellis_codes(to: str, packed: dict[str, Packed], tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="espalier-format quantize"):
        convert_checkpoint(packed["mixed"].draft.write(tmp_path / "packed"), tmp_path / "out", to=to)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_only_the_index_names_is_not_left_out_silently(packed: dict[str, Packed], tmp_path: Path) -> None:
    source = packed["awq"].draft.write(tmp_path / "packed")
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["mtp.layers.0.mlp.gate.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(IndexMismatchError, match="no shard holds it") as caught:
        convert_checkpoint(source, tmp_path / "out", to="hf")
    assert caught.value.tensor == "mtp.layers.0.mlp.gate.weight"
    assert not (tmp_path / "out").exists()


def test_packed_weights_without_a_config_are_refused(packed: dict[str, Packed], tmp_path: Path) -> None:
    """As plain tensors they would be copied as they are into a checkpoint that says it is not quantized."""
    draft = packed["awq"].draft
    source = draft.write(tmp_path / "packed")
    config = {key: value for key, value in (draft.config or {}).items() if key != "quantization_config"}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match="no quantization_config"):
        open_checkpoint(source)
    (source / "config.json").unlink()
    with pytest.raises(MissingFileError, match="no quantization_config"):
        open_checkpoint(source)


def test_integers_without_a_config_are_refused(tmp_path: Path) -> None:
    tensors = {
        "weight": Tensor("I8", (4, 32), b"\1" * 128),
        "weight_scale": Tensor.of(np.full((4, 1), 0x3C00, np.uint16), "BF16"),
    }
    draft = one_module(tensors, {"num_bits": 8, "strategy": "channel"}, label="int-quantized")
    open_checkpoint(draft.write(tmp_path)).close()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(MissingFileError, match="no quantization_config"):
        open_checkpoint(tmp_path)


def test_a_module_that_is_quantized_though_ignored_is_converted_with_a_warning(
    packed: dict[str, Packed], tmp_path: Path
) -> None:
    source = packed["mixed"].draft.write(tmp_path / "packed")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["ignore"].append("re:.*self_attn.*")
    (source / "config.json").write_text(json.dumps(config))
    report = convert_checkpoint(source, tmp_path / "hf", to="hf")
    assert [warning.partition("though")[2] for warning in report.warnings] == [" the config ignores them"]
    written = read_safetensors(tmp_path / "hf" / "model.safetensors")[0]
    name = "model.language_model.layers.3.self_attn.q_proj"
    assert written[f"{name}.weight"] == packed["mixed"].expected[name]


def test_a_module_that_no_target_names_is_refused(packed: dict[str, Packed], tmp_path: Path) -> None:
    draft = packed["mixed"].draft
    source = draft.write(tmp_path / "packed")
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]["config_groups"]["attention"]
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match="no target of the config names it") as caught:
        open_checkpoint(source)
    assert "self_attn" in (caught.value.tensor or "")


def test_memory_does_not_grow_with_the_matrix(tmp_path: Path) -> None:
    """A head of 64 MB in BF16 is decoded block by block; only allocations of Python are counted, not mapped files."""
    outputs, inputs = 16384, 2048
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (outputs, inputs // 8), np.int64).astype(np.int32)
    scale = np.full((outputs, inputs // 128), 0x3C00, np.uint16)
    tensors = {
        "weight_packed": Tensor.of(words, "I32"),
        "weight_scale": Tensor.of(scale, "BF16"),
        "weight_shape": Tensor.of(np.array([outputs, inputs]), "I64"),
    }
    draft = one_module(tensors, {"num_bits": 4, "strategy": "group", "group_size": 128})
    source = draft.write(tmp_path / "packed")
    del words, tensors, draft
    with open_checkpoint(source) as checkpoint:
        tracemalloc.start()
        try:
            to_hf(checkpoint, tmp_path / "hf", threads=1)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert (tmp_path / "hf" / "model.safetensors").stat().st_size > outputs * inputs * 2
    assert peak < 56 * 2**20


def test_an_interrupted_conversion_is_taken_up_with_force(
    packed: dict[str, Packed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As every conversion: nothing is seen of an unfinished output, and a run after it finishes the work."""
    source, output = packed["mixed"].draft.write(tmp_path / "packed"), tmp_path / "hf"

    class Interrupted(NullProgress):
        def advance(self, n_bytes: int) -> None:
            raise WriteError("stopped", path=output)

    with open_checkpoint(source) as checkpoint, pytest.raises(WriteError, match="stopped"):
        to_hf(checkpoint, output, progress=Interrupted())
    assert not (output / "config.json").exists()
    convert_checkpoint(source, output, to="hf")
    whole = (output / "model.safetensors").read_bytes()
    with pytest.raises(OutputExistsError):
        convert_checkpoint(source, output, to="hf")
    convert_checkpoint(source, output, to="hf", force=True)
    assert (output / "model.safetensors").read_bytes() == whole
