"""Quantize a compressed-tensors checkpoint: what is encoded is what the library decodes, the rest becomes plain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from builders import Tensor
from compressed_tensors_cases import FILES, SUPER, Packed, args, awq, build, compress, mixed, model, one_module
from quantize_cases import stored_block, stored_tensors, write_recipe

from espalier_format.checkpoint import open_checkpoint
from espalier_format.errors import IndexMismatchError, SourceError, UsageError
from espalier_format.operations.quantize import quantize_checkpoint
from espalier_format.operations.verify import verify_checkpoint
from espalier_format.quantize.inventory import take_inventory

MIXED = (
    f'match = ["{SUPER[0]}.*_proj", "{SUPER[1]}.*_proj"]\ncodebook = "int6@4"',
    'match = "*.mlp.experts.*"\ncodebook = "e2m1@2"',
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compressed-tensors") / "original"


@pytest.fixture(scope="module")
def hybrid(original: Path) -> Packed:
    return build(original, mixed())


def test_the_encoder_gets_the_weights_that_the_library_decodes(hybrid: Packed, tmp_path: Path) -> None:
    with open_checkpoint(hybrid.draft.write(tmp_path)) as source:
        found = take_inventory(source, exl3=False)
        assert hybrid.expected.keys() <= found.keys()
        for name, expected in hybrid.expected.items():
            matrix = found[name].matrix
            bits = expected.array().astype(np.uint32).reshape(expected.shape) << 16
            assert np.array_equal(matrix.rows(0, expected.shape[0]).view(np.uint32), bits), name
            assert matrix.stored_rows(3, 9) == expected.data[3 * 2 * expected.shape[1] : 9 * 2 * expected.shape[1]]


@pytest.mark.usefixtures("fake_encoder")
@pytest.mark.parametrize("to", ["espalier", "exl3"])
def test_nothing_says_that_the_output_is_packed(to: Literal["espalier", "exl3"], tmp_path: Path) -> None:
    """Loaders look in several places, and every one of them spoke of weights that are not there any more."""
    weights = args(4, 32)
    draft = one_module(compress(torch.randn(128, 128), weights, "pack-quantized")[0], weights.model_dump(mode="json"))
    assert draft.config is not None
    block = draft.config["quantization_config"]
    places = {"quantization_config": block, "compression_config": {"quant_method": "fp8"}}
    draft.config = {"first": 1, **places, "text_config": {**places, "a": 1}, "llm_config": dict(places), "last": 1}
    source = draft.write(tmp_path / "packed")
    recipe = write_recipe(tmp_path, 'match = "m"\ncodebook = "exl3-mul1@2"')
    quantize_checkpoint(source, tmp_path / "out", recipe=recipe, to=to)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == to
    assert config == {"first": 1, "text_config": {"a": 1}, "llm_config": {}, "last": 1}


@pytest.mark.usefixtures("fake_encoder")
def test_super_experts_can_be_wider_and_all_else_stays(hybrid: Packed, original: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = quantize_checkpoint(hybrid.draft.write(tmp_path / "packed"), out, recipe=write_recipe(tmp_path, *MIXED))
    assert verify_checkpoint(out, deep=True).exit_code == 0
    assert report.source_format == "compressed-tensors"
    stored = stored_tensors(out)
    assert not any(name.rpartition(".")[2].startswith("weight_") for name in stored)
    bank = stored_block(out)["expert_banks"]["model.language_model.layers.2.mlp.experts"]
    projection = bank["projections"]["up_proj"]
    assert [projection["codebooks"]["0123456789".index(x)] for x in projection["assignment"]] == [
        "e2m1@2", "int6@4", "e2m1@2", "e2m1@2"]  # fmt: skip
    _, before = model(original)
    encoded = {module for module in before_modules(before) if f"{module}.esp_trellis" in stored}
    assert all(".mlp.experts." in module for module in encoded)
    for name, tensor in before.items():
        module = name.removesuffix(".weight")
        if module not in encoded:  # attention, packed as int8, is kept: it becomes plain
            assert stored[name] == hybrid.expected.get(module, tensor), name
    for file, content in FILES.items():
        assert (out / file).read_bytes() == content
    assert stored_block(out)["source"]["format"] == "compressed-tensors"


def before_modules(tensors: dict[str, Tensor]) -> list[str]:
    return [name.removesuffix(".weight") for name in tensors]


@pytest.mark.usefixtures("fake_encoder")
def test_what_may_not_be_quantized_becomes_plain_even_if_it_was_packed(original: Path, tmp_path: Path) -> None:
    case, out = build(original, awq()), tmp_path / "out"
    gate = "model.language_model.layers.0.mlp.shared_expert_gate"
    assert gate in case.expected
    quantize_checkpoint(
        case.draft.write(tmp_path / "packed"), out, recipe=write_recipe(tmp_path, 'match = "*"\ncodebook = "e2m1@2"')
    )
    assert verify_checkpoint(out).exit_code == 0
    assert stored_tensors(out)[f"{gate}.weight"] == case.expected[gate]
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "espalier"


@pytest.mark.usefixtures("fake_encoder")
def test_to_exl3_as_well(hybrid: Packed, tmp_path: Path) -> None:
    out = tmp_path / "out"
    rule = 'match = "*.mlp.experts.*"\ncodebook = "exl3-mul1@2"'
    quantize_checkpoint(hybrid.draft.write(tmp_path / "packed"), out, to="exl3", recipe=write_recipe(tmp_path, rule))
    with open_checkpoint(out) as checkpoint:
        assert checkpoint.format == "exl3"
        attention = "model.language_model.layers.3.self_attn.q_proj"
        assert checkpoint.tensor(f"{attention}.weight").tobytes() == hybrid.expected[attention].data


@pytest.mark.usefixtures("fake_encoder")
def test_work_is_not_resumed_with_another_reading_of_the_same_bytes(hybrid: Packed, tmp_path: Path) -> None:
    """The config says how bytes decode: where it has changed, finished modules are of other weights."""
    source, out = hybrid.draft.write(tmp_path / "packed"), tmp_path / "out"
    recipe = write_recipe(tmp_path, *MIXED)
    with open_checkpoint(source) as checkpoint:
        before = {name: module.scheme.label for name, module in checkpoint.packed.items()}
    from espalier_format.quantize import run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_assemble", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(source, out, recipe=recipe)
    config = json.loads((source / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["super"]["weights"]["strategy"] = "channel"
    assert "channel" not in before[f"{SUPER[0]}.up_proj"]
    # Groups of 128 are whole rows of this model, so both readings fit the bytes.
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError):
        quantize_checkpoint(source, out, recipe=recipe, resume=True)


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_tensor_that_only_the_index_names_is_refused(hybrid: Packed, tmp_path: Path) -> None:
    source = hybrid.draft.write(tmp_path / "packed")
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["x.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(IndexMismatchError, match="no shard holds it"):
        quantize_checkpoint(source, tmp_path / "out", recipe=write_recipe(tmp_path, *MIXED))


def test_other_methods_are_refused(hybrid: Packed, tmp_path: Path) -> None:
    source = hybrid.draft.write(tmp_path / "packed")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "quark"
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match="'quark'"):
        quantize_checkpoint(source, tmp_path / "out", recipe=write_recipe(tmp_path, *MIXED))
