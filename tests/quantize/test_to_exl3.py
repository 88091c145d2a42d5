"""Writing EXL3: what exllamav3 loads, and warnings about what it does not.

Nothing here runs exllamav3; the rules are those of spec/exl3.md. The encoder is the one of tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import (
    MARKERS,
    Bank,
    Exl3Module,
    Module,
    bf16,
    espalier_draft,
    exl3_draft,
    llama_config,
    read_safetensors,
)
from quantize_cases import dense_draft, matrix, moe_draft, moe_tensors, stored_tensors, values, widened, write_recipe

from espalier_format.checkpoint import open_checkpoint
from espalier_format.errors import EspalierError, LossyError, SourceError, UsageError
from espalier_format.operations.convert import convert_checkpoint
from espalier_format.operations.quantize import quantize_checkpoint
from espalier_format.operations.verify import verify_checkpoint

pytestmark = pytest.mark.usefixtures("fake_encoder")

BANK = "model.language_model.layers.0.mlp.experts"


def test_the_files_are_those_of_exl3(tmp_path: Path) -> None:
    draft = dense_draft(hidden=128)
    out = tmp_path / "out"
    recipe = write_recipe(
        tmp_path, 'match = "*_proj"\ncodebook = "exl3-mul1@2.5"', 'match = "lm_head"\ncodebook = "exl3-3inst@6"'
    )
    report = quantize_checkpoint(draft.write(tmp_path / "m"), out, recipe=recipe, to="exl3")
    assert report.target_format == "exl3"
    assert verify_checkpoint(out, deep=True).exit_code == 0
    first, metadata = read_safetensors(out / "model-00001-of-00002.safetensors")
    assert metadata is None
    layer = "model.layers.0.self_attn.q_proj"
    assert [name for name in first if name.startswith(layer)] == [
        f"{layer}.suh", f"{layer}.svh", f"{layer}.mul1", f"{layer}.trellis", f"{layer}.bias"
    ]  # fmt: skip
    assert first[f"{layer}.mul1"].shape == ()
    assert int(first[f"{layer}.mul1"].array().view("<u4")) == MARKERS["mul1"]
    assert first[f"{layer}.trellis"].shape == (8, 8, 40)
    assert first["model.layers.0.self_attn.k_proj.trellis"].shape == (8, 8, 40)  # 32 outputs, padded
    assert not first["model.layers.0.self_attn.k_proj.svh"].array()[32:].any()
    bias = first[f"{layer}.bias"]  # exllamav3 casts F32; BF16 is exact in it
    assert bias.dtype == "F32"
    assert np.array_equal(bias.array(), widened(draft[f"{layer}.bias"]))
    second = read_safetensors(out / "model-00002-of-00002.safetensors")[0]
    assert not [name for name in second if name.endswith((".mcg", ".mul1"))]
    block = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (block["quant_method"], block["bits"], block["head_bits"], block["codebook"]) == ("exl3", 2.5, 6, "mul1")
    storage = json.loads((out / "quantization_config.json").read_text())["tensor_storage"]
    assert storage[layer]["bits_per_weight"] == 2.5
    assert storage[layer]["mul1_multiplier"] == MARKERS["mul1"]
    assert "decode_digests" not in json.loads((out / "espalier_manifest.json").read_text())
    with open_checkpoint(out) as made:
        assert made.modules[layer].codebook.name == "exl3-mul1@2.5"
        # Converted to Espalier, it is the same checkpoint.
        convert_checkpoint(out, tmp_path / "esp", to="espalier")
        with open_checkpoint(tmp_path / "esp") as converted:
            for name in made.modules:
                assert np.array_equal(made.decode(name), converted.decode(name))


def test_all_experts_of_a_projection_get_one_width_and_gate_and_up_the_same(tmp_path: Path) -> None:
    draft = moe_draft(experts=4, hidden=128, width=128)
    assert draft.config is not None
    draft.config["text_config"]["hidden_size"] = 128
    report = quantize_checkpoint(draft.write(tmp_path / "m"), tmp_path / "out", bits=3.35, to="exl3")
    assert abs(report.bits - 3.35) <= 0.005  # padding counts, other than in what EXL3's own config states
    assert verify_checkpoint(tmp_path / "out", deep=True).exit_code == 0
    with open_checkpoint(tmp_path / "out") as made:
        widths: dict[str, set[str]] = {}
        for name, module in made.modules.items():
            if name.startswith(BANK):
                widths.setdefault(name.rpartition(".")[2], set()).add(module.codebook.name)
        assert all(len(names) == 1 for names in widths.values())
        assert widths["gate_proj"] == widths["up_proj"]
        assert len(made.expert_banks[BANK].projections) == 3
    assert not [line for line in report.warnings if "hidden size" in line]
    kept = stored_tensors(tmp_path / "out")
    assert (
        kept[f"{BANK.removesuffix('.experts')}.gate.weight"]
        == moe_tensors(hidden=128)[f"{BANK.removesuffix('.experts')}.gate.weight"]
    )


def test_sizes_that_exllamav3_cannot_run_are_warned_about(tmp_path: Path) -> None:
    source = dense_draft(hidden=64, config={"hidden_size": 576, "intermediate_size": 60_000})
    report = quantize_checkpoint(source.write(tmp_path / "m"), tmp_path / "out", bits=12.8, to="exl3")
    assert any("hidden size 576 is no multiple of 128" in line for line in report.warnings)
    assert any("60000 wide" in line for line in report.warnings)


def test_experts_that_are_kept_among_others_are_warned_about(tmp_path: Path) -> None:
    source = moe_draft(hidden=128, width=128).write(tmp_path / "m")
    recipe = write_recipe(
        tmp_path, f'match = "{BANK}.1.*"\nkeep = true', f'match = "{BANK}.*"\ncodebook = "exl3-mul1@2"'
    )
    report = quantize_checkpoint(source, tmp_path / "out", recipe=recipe, to="exl3")
    assert any("exllamav3 may not load that" in line for line in report.warnings)


def test_espalier_becomes_exl3_by_encoding_again(tmp_path: Path) -> None:
    modules = (
        Module("model.layers.0.mlp.up_proj", 96, 200, "e2m1@2", (32, 64), bias="BF16"),
        Module("model.layers.0.mlp.down_proj", 200, 96, "exl3-mcg@3", (128, 128), bias="BF16"),
    )
    source = espalier_draft(modules, (), config=llama_config(hidden=96, intermediate=200)).write(tmp_path / "m")
    with pytest.raises(LossyError, match="the module is kept, but EXL3 cannot hold e2m1@2"):
        quantize_checkpoint(
            source,
            tmp_path / "out",
            to="exl3",
            recipe=write_recipe(tmp_path, 'match = "*.down_proj"\ncodebook = "exl3-mcg@2"'),
        )
    recipe = write_recipe(tmp_path, 'match = "*.up_proj"\ncodebook = "exl3-mul1@2"')
    quantize_checkpoint(source, tmp_path / "out", to="exl3", recipe=recipe)
    assert verify_checkpoint(tmp_path / "out", deep=True).exit_code == 0
    with open_checkpoint(source) as old, open_checkpoint(tmp_path / "out") as new:
        name = "model.layers.0.mlp.down_proj"
        assert np.array_equal(old.decode(name), new.decode(name))
        assert new.modules["model.layers.0.mlp.up_proj"].codebook.name == "exl3-mul1@2"
        for module in new.modules.values():
            assert module.bias is not None
            assert module.bias.shape == (module.padded_out,)


def test_exl3_is_encoded_again_to_exl3(tmp_path: Path) -> None:
    modules = [
        Exl3Module("model.layers.0.mlp.up_proj", 96, 200, 4, "mcg", "F16"),
        Exl3Module("lm_head", 96, 90, 6, "mcg"),
    ]
    source = exl3_draft(modules, config=llama_config(hidden=96, intermediate=200)).write(tmp_path / "m")
    recipe = write_recipe(tmp_path, 'match = "*.up_proj"\ncodebook = "exl3-mul1@2"')
    quantize_checkpoint(source, tmp_path / "out", to="exl3", recipe=recipe)
    before, after = stored_tensors(source), stored_tensors(tmp_path / "out")
    assert {name: t for name, t in after.items() if "up_proj" not in name} == {
        name: t for name, t in before.items() if "up_proj" not in name
    }
    assert after["model.layers.0.mlp.up_proj.bias"] == before["model.layers.0.mlp.up_proj.bias"]
    assert "model.layers.0.mlp.up_proj.mcg" not in after


def test_what_was_encoded_anew_from_exl3_converts_to_exl3_with_a_block_of_its_own(tmp_path: Path) -> None:
    modules = [Exl3Module("model.layers.0.mlp.up_proj", 128, 256, 4, "mcg"), Exl3Module("lm_head", 128, 90, 6, "mcg")]
    source = exl3_draft(modules, config=llama_config(hidden=128, intermediate=256)).write(tmp_path / "m")
    recipe = write_recipe(tmp_path, 'match = "*.up_proj"\ncodebook = "exl3-mul1@2"\nrotation = 128')
    quantize_checkpoint(source, tmp_path / "esp", recipe=recipe)
    convert_checkpoint(tmp_path / "esp", tmp_path / "out", to="exl3")
    block = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert block["bits"] == 2.0
    assert block["producer"]["name"] == "espalier-format"


CASES: list[tuple[type[EspalierError], str, str, dict[str, Any]]] = [
    (UsageError, "EXL3 has no grid codebooks", 'match = "*_proj"\ncodebook = "e2m1@2"', {}),
    (UsageError, "blocks of 128 only", 'match = "*_proj"\ncodebook = "exl3-mcg@2"\nrotation = 64', {}),
    (
        UsageError,
        "in one codebook, but the rules divide them",
        'match = "*.up_proj"\ncodebook = "exl3-mcg@2"\n[[rule]]\nmatch = "*_proj"\ncodebook = "exl3-mcg@3"',
        {},
    ),
    (
        SourceError,
        "a scale in the weights of mistral4",
        'match = "*_proj"\ncodebook = "exl3-mcg@2"',
        {"model_type": "mistral4"},
    ),
    (
        SourceError,
        "a scale in the weights of laguna",
        'match = "*_proj"\ncodebook = "exl3-mcg@2"',
        {"llm_config": {"model_type": "laguna"}},
    ),
]


@pytest.mark.parametrize(("kind", "message", "rule", "config"), CASES)
def test_what_exl3_cannot_hold_is_refused(
    kind: type[EspalierError], message: str, rule: str, config: dict[str, Any], tmp_path: Path
) -> None:
    draft = dense_draft(config=config)
    draft["model.layers.0.mlp.experts.0.up_proj.weight"] = matrix("e", 32, 64)
    with pytest.raises(kind, match=message):
        quantize_checkpoint(
            draft.write(tmp_path / "m"), tmp_path / "out", to="exl3", recipe=write_recipe(tmp_path, rule)
        )
    assert not (tmp_path / "out").exists()


def test_presets_are_for_grids(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="presets use grid codebooks"):
        quantize_checkpoint(dense, tmp_path / "out", preset_name="espalier", to="exl3")


def test_experts_of_espalier_banks_share_a_width_in_exl3(tmp_path: Path) -> None:
    bank = Bank("model.layers.0.mlp.experts", {"gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96)})
    source = espalier_draft((), (bank,)).write(tmp_path / "m")
    quantize_checkpoint(
        source,
        tmp_path / "out",
        to="exl3",
        recipe=write_recipe(tmp_path, 'component = "experts"\ncodebook = "exl3-mul1@1.5"'),
    )
    assert verify_checkpoint(tmp_path / "out", deep=True).exit_code == 0


def test_biases_beside_tied_and_fused_weights_are_padded(tmp_path: Path) -> None:
    """They are biases of the modules that are made of them; an EXL3 reader takes the padded size only."""
    tied = dense_draft(hidden=128, tied=True)
    tied["lm_head.bias"] = bf16(values("bias", (50,)))
    experts = moe_draft()
    experts[f"{BANK}.2.gate_proj.bias"] = bf16(values("bias", (32,)))
    for number, (draft, module) in enumerate(((tied, "lm_head"), (experts, f"{BANK}.2.gate_proj"))):
        out = tmp_path / f"out{number}"
        recipe = write_recipe(
            tmp_path, f'match = ["{module}", "{BANK if number else "*"}.*"]\ncodebook = "exl3-mul1@2"'
        )
        quantize_checkpoint(draft.write(tmp_path / f"m{number}"), out, recipe=recipe, to="exl3")
        assert verify_checkpoint(out, deep=True).exit_code == 0
        expected = widened(draft[f"{module}.bias"])
        with open_checkpoint(out) as made:
            bias = made.modules[module].bias
            assert bias is not None
            assert bias.shape == (128,)
            assert np.array_equal(bias.array(), np.pad(expected, (0, 128 - len(expected))))


def test_absurd_numbers_of_heads_divide_nothing(tmp_path: Path) -> None:
    draft = dense_draft(config={"num_attention_heads": 10**4000, "head_dim": 10**4000, "num_key_value_heads": 3})
    fused = "model.layers.1.self_attn.qkv_proj"
    draft[f"{fused}.weight"] = matrix("qkv", 192, 64)
    recipe = write_recipe(tmp_path, f'match = "{fused}"\ncodebook = "exl3-mul1@2"')
    report = quantize_checkpoint(draft.write(tmp_path / "m"), tmp_path / "out", recipe=recipe, to="exl3")
    assert [module.name for module in report.modules] == [fused]
