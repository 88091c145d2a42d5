"""The whole of a quantization but for the encoder, which is replaced by one that gives random codes at once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Exl3Module, Tensor, bf16, espalier_draft, exl3_draft, llama_config, read_safetensors
from quantize_cases import (
    dense_draft,
    matrix,
    moe_draft,
    moe_tensors,
    stored_block,
    stored_tensors,
    values,
    widened,
    write_recipe,
)

from espalier_format.checkpoint import open_checkpoint
from espalier_format.container.shard import Shard
from espalier_format.errors import (
    OutputExistsError,
)
from espalier_format.operations.quantize import quantize_checkpoint
from espalier_format.operations.verify import verify_checkpoint

pytestmark = pytest.mark.usefixtures("fake_encoder")

BANK = "model.language_model.layers.0.mlp.experts"


def _check(folder: Path) -> None:
    report = verify_checkpoint(folder, deep=True)
    assert report.exit_code == 0, [str(finding) for check in report.checks for finding in check.findings]


def test_a_dense_model_keeps_its_shards_and_everything_else(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize_checkpoint(dense, out, recipe=write_recipe(tmp_path, 'match = "*_proj"\ncodebook = "e2m1@2"'))
    _check(out)
    draft = dense_draft()
    first, metadata = read_safetensors(out / "model-00001-of-00002.safetensors")
    assert metadata == {"format": "pt", "espalier_format_version": "1"}
    expected: list[str] = []
    for name in draft.shards["model-00001-of-00002.safetensors"]:
        module = name.removesuffix(".weight")
        quantized = module.endswith("_proj")
        expected += [f"{module}.esp_{kind}" for kind in ("suh", "svh", "trellis")] if quantized else [name]
    assert list(first) == expected
    for name, tensor in first.items():
        if ".esp_" not in name:
            assert tensor == draft[name]
    second = "model-00002-of-00002.safetensors"
    assert (out / second).read_bytes() == (dense / second).read_bytes()
    assert (out / "tokenizer.json").read_bytes() == b"{}\n"
    block = stored_block(out)
    assert block["bits"] == round(
        2 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 96 * 3) / (64 * 64 * 2 + 64 * 32 * 2 + 64 * 96 * 3), 6
    )
    assert block["head_bits"] is None
    assert block["ignore"] == ["lm_head"]
    assert block["source"] == {"format": "plain", "seed": 0}
    assert len(json.loads((out / "espalier_manifest.json").read_text())["decode_digests"]) == 7


def test_no_digests_if_not_wanted(dense: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, 'match = "*_proj"\ncodebook = "e2m1@2"')
    quantize_checkpoint(dense, tmp_path / "out", recipe=recipe, digests=False)
    assert "decode_digests" not in json.loads((tmp_path / "out" / "espalier_manifest.json").read_text())


def test_the_block_rule_and_what_a_recipe_says_instead(tmp_path: Path) -> None:
    draft = dense_draft()
    sizes = {"a_proj": (256, 192), "b_proj": (96, 72), "c_proj": (40, 256), "d_proj": (32, 64)}
    for name, size in sizes.items():
        draft[f"model.layers.1.{name}.weight"] = matrix(name, *size)
    recipe = write_recipe(
        tmp_path,
        'match = "*.d_proj"\ncodebook = "e2m1@2"\nrotation = {in = 0, out = 32}',
        'match = "model.layers.1.*"\ncodebook = "e2m1@2"',
    )
    quantize_checkpoint(draft.write(tmp_path / "m"), tmp_path / "out", recipe=recipe)
    _check(tmp_path / "out")
    modules = stored_block(tmp_path / "out")["modules"]
    rotations = {name.rpartition(".")[2]: (m["rotation"]["in"], m["rotation"]["out"]) for name, m in modules.items()}
    assert rotations == {"a_proj": (64, 128), "b_proj": (128, 32), "c_proj": (128, 128), "d_proj": (0, 32)}
    assert stored_tensors(tmp_path / "out")["model.layers.1.b_proj.esp_trellis"].shape == (8, 6, 32)


def test_experts_make_banks_of_mixed_widths(moe: Path, tmp_path: Path) -> None:
    """Expert e has weights 4^e times as large, so wider codebooks must go to later experts."""
    out = tmp_path / "out"
    report = quantize_checkpoint(moe, out, preset_name="espalier")
    _check(out)
    bank = stored_block(out)["expert_banks"][BANK]
    assert bank["num_experts"] == 4
    assert set(bank["projections"]) == {"gate_proj", "up_proj", "down_proj"}
    for projection in bank["projections"].values():
        widths = [projection["codebooks"][int(character)].partition("@")[2] for character in projection["assignment"]]
        assert widths == sorted(widths)
        assert widths[0] == "1"
        assert widths[-1] == "3"
    mtp = stored_block(out)["expert_banks"]["mtp.layers.0.mlp.experts"]["projections"]
    assert [entry["codebooks"] for entry in mtp.values()] == [["int5@3"]] * 3
    modules = {name: entry["codebook"] for name, entry in stored_block(out)["modules"].items()}
    assert modules == {
        "model.language_model.layers.0.mlp.shared_expert.up_proj": "int6@4",
        "model.language_model.layers.0.linear_attn.in_proj_qkv": "int6@4",
        "lm_head": "int8@6",
    }
    kept = stored_tensors(out)
    for name, tensor in moe_tensors().items():
        if name in kept:
            assert kept[name] == tensor
    for part in ("mlp.gate", "shared_expert_gate", "in_proj_a", "conv1d", "linear_fc1", "mtp.fc", "embed_tokens"):
        assert [name for name in kept if name.endswith(f"{part}.weight")], part
    assert "mtp.layers.0.self_attn.q_proj.weight" in kept
    experts = [m for m in report.modules if m.name.startswith(BANK)]
    average = sum(float(m.codebook.partition("@")[2]) for m in experts) / len(experts)
    assert average == 2.0


@pytest.mark.parametrize("bits", [1.75, 2.12, 3.3])
def test_bits_are_met_as_the_config_defines_them(bits: float, tmp_path: Path) -> None:
    """Head, MTP and vision do not count."""
    source = moe_draft(experts=16).write(tmp_path / "m")
    report = quantize_checkpoint(source, tmp_path / "out", bits=bits)
    _check(tmp_path / "out")
    assert abs(stored_block(tmp_path / "out")["bits"] - bits) <= 0.005
    assert report.bits == stored_block(tmp_path / "out")["bits"]
    assert report.requested_bits == bits


def test_sensitivity_moves_bits(tmp_path: Path) -> None:
    source = moe_draft(experts=4).write(tmp_path / "m")
    (tmp_path / "s.json").write_text(json.dumps({f"{BANK}.0.*": 1e9}))
    quantize_checkpoint(source, tmp_path / "out", preset_name="espalier", sensitivity=tmp_path / "s.json")
    for projection in stored_block(tmp_path / "out")["expert_banks"][BANK]["projections"].values():
        assert projection["codebooks"][int(projection["assignment"][0])] == "int5@3"


def test_kept_experts_of_a_fused_tensor_become_tensors_of_their_own(moe: Path, tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path,
        f'match = "{BANK}.1.*"\nkeep = true',
        f'match = "{BANK}.*.up_proj"\ncodebook = "e2m1@2"',
    )
    quantize_checkpoint(moe, tmp_path / "out", recipe=recipe)
    _check(tmp_path / "out")
    block = stored_block(tmp_path / "out")
    assert {n: p["assignment"] for n, p in block["expert_banks"][BANK]["projections"].items()} == {"up_proj": "0-00"}
    assert f"{BANK}.1.up_proj" in block["ignore"]
    assert f"{BANK}.0.gate_proj" in block["ignore"]
    kept = stored_tensors(tmp_path / "out")
    fused = widened(moe_tensors()[f"{BANK}.gate_up_proj"])
    assert np.array_equal(widened(kept[f"{BANK}.1.up_proj.weight"]), fused[1, 32:])
    assert np.array_equal(widened(kept[f"{BANK}.3.gate_proj.weight"]), fused[3, :32])
    assert kept[f"{BANK}.down_proj"] == moe_tensors()[f"{BANK}.down_proj"]
    assert f"{BANK}.gate_up_proj" not in kept


@pytest.mark.parametrize("stated", [True, None])
def test_a_tied_head_is_untied(stated: bool | None, tmp_path: Path) -> None:
    config = {"tie_word_embeddings": stated, "text_config": {"hidden_size": 64, "tie_word_embeddings": stated}}
    draft = dense_draft(tied=True, config=config)
    recipe = write_recipe(tmp_path, 'match = "lm_head"\ncodebook = "int8@6"')
    quantize_checkpoint(draft.write(tmp_path / "m"), tmp_path / "out", recipe=recipe)
    _check(tmp_path / "out")
    document = json.loads((tmp_path / "out" / "config.json").read_text())
    assert document["tie_word_embeddings"] is False
    assert document["text_config"]["tie_word_embeddings"] is False
    written = stored_tensors(tmp_path / "out")
    assert written["model.embed_tokens.weight"] == draft["model.embed_tokens.weight"]
    assert "lm_head.esp_trellis" in written
    replaced = stored_block(tmp_path / "out")["source"].get("replaced_config", {})
    assert replaced == (
        {"tie_word_embeddings": True, "text_config.tie_word_embeddings": True} if stated is True else {}
    )


def test_a_tie_stays_where_the_head_is_kept(tmp_path: Path) -> None:
    source = dense_draft(tied=True).write(tmp_path / "m")
    quantize_checkpoint(
        source, tmp_path / "out", recipe=write_recipe(tmp_path, 'match = "*_proj"\ncodebook = "e2m1@2"')
    )
    document = json.loads((tmp_path / "out" / "config.json").read_text())
    assert document["tie_word_embeddings"] is True
    assert not [name for name in stored_tensors(tmp_path / "out") if "lm_head" in name]


def test_exl3_and_espalier_are_encoded_again_or_kept(tmp_path: Path) -> None:
    config = llama_config(hidden=96, intermediate=200, heads=3, head_dim=32, vocab=90)
    modules = [
        Exl3Module("model.layers.0.self_attn.q_proj", 96, 96, 3, "mcg", "F16", packed_su=True),
        Exl3Module("model.layers.0.mlp.up_proj", 96, 200, 2, "mul1", "F16"),
        Exl3Module("lm_head", 96, 90, 4, "mcg"),
    ]
    source = exl3_draft(modules, config=config).write(tmp_path / "exl3")
    recipe = write_recipe(tmp_path, 'match = "*.up_proj"\ncodebook = "e2m1@2"')
    quantize_checkpoint(source, tmp_path / "first", recipe=recipe)
    _check(tmp_path / "first")
    block = stored_block(tmp_path / "first")
    assert {name: entry["codebook"] for name, entry in block["modules"].items()} == {
        "model.layers.0.self_attn.q_proj": "exl3-mcg@3",
        "model.layers.0.mlp.up_proj": "e2m1@2",
        "lm_head": "exl3-mcg@4",
    }
    assert block["source"]["format"] == "exl3"
    written = stored_tensors(tmp_path / "first")
    assert written["model.layers.0.mlp.up_proj.bias"].shape == (200,)
    assert not (tmp_path / "first" / "quantization_config.json").exists()
    with open_checkpoint(source) as old, open_checkpoint(tmp_path / "first") as new:
        for name in ("model.layers.0.self_attn.q_proj", "lm_head"):
            assert np.array_equal(old.decode(name), new.decode(name))
    # Once more: what was exl3 is now encoded, the grid module kept.
    recipe = write_recipe(tmp_path, 'match = "*.q_proj"\ncodebook = "int6@4"')
    quantize_checkpoint(tmp_path / "first", tmp_path / "second", recipe=recipe)
    _check(tmp_path / "second")
    again = stored_tensors(tmp_path / "second")
    for name, tensor in written.items():
        if "q_proj.esp" not in name:
            assert again[name] == tensor
    assert stored_block(tmp_path / "second")["modules"]["model.layers.0.self_attn.q_proj"]["codebook"] == "int6@4"
    assert stored_block(tmp_path / "second")["source"] == {"format": "exl3", "seed": 0}


def test_what_is_kept_quantized_counts_for_bits(tmp_path: Path) -> None:
    source = espalier_draft().write(tmp_path / "m")
    with open_checkpoint(source) as before:
        kept = [m for m in before.modules.values() if ".experts." in m.name or "o_proj" in m.name]
        fixed = sum(m.codebook.half_steps * m.padded_in * m.padded_out / 2 for m in kept)
        sizes = sum(m.weights for m in before.modules.values() if m.name != "lm_head")
        free = [m for m in before.modules.values() if m not in kept and m.name != "lm_head"]
    books = "[" + ", ".join(f'"{b}"' for b in ("e2m1@1", "e2m1@1.5", "e2m1@2", "int5@3", "int6@4")) + "]"
    rule = f'match = ["*.q_proj", "*.shared_expert.up_proj"]\ncodebook = {books}'
    middle = (fixed + sum(2 * m.padded_in * m.padded_out for m in free)) / sizes
    quantize_checkpoint(source, tmp_path / "out", recipe=write_recipe(tmp_path, rule, bits=round(middle, 3)))
    _check(tmp_path / "out")
    assert abs(stored_block(tmp_path / "out")["bits"] - middle) <= 0.006


def test_other_weights_are_not_copied(dense: Path, tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json", "original/consolidated.00.pth", "notes.txt"):
        (dense / name).parent.mkdir(exist_ok=True)
        (dense / name).write_bytes(b"{}")
    recipe = write_recipe(tmp_path, 'match = "*_proj"\ncodebook = "e2m1@2"')
    report = quantize_checkpoint(dense, tmp_path / "out", recipe=recipe)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json", "espalier_manifest.json", "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors", "model.safetensors.index.json", "notes.txt", "tokenizer.json",
    ]  # fmt: skip
    assert any("pytorch_model.bin" in line for line in report.warnings)


def test_two_runs_give_the_same_bytes_and_another_seed_or_effort_does_not(moe: Path, tmp_path: Path) -> None:
    runs: dict[str, dict[str, Any]] = {"a": {}, "b": {}, "c": {"seed": 1}, "d": {"effort": "fast"}}
    for name, options in runs.items():
        report = quantize_checkpoint(moe, tmp_path / name, preset_name="espalier", **options)
        assert report.to_json()["effort"] == options.get("effort", "thorough")
    first, second, *others = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in runs)
    assert first == second
    assert all(first["model.safetensors"] != other["model.safetensors"] for other in others)
    assert stored_block(tmp_path / "c")["source"]["seed"] == 1


def test_the_report_has_every_module(moe: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    quantize_checkpoint(moe, tmp_path / "out", preset_name="espalier", report=path)
    document = json.loads(path.read_text())
    with open_checkpoint(tmp_path / "out") as made:
        assert [module["name"] for module in document["modules"]] == list(made.modules)
        for module in document["modules"]:
            assert made.modules[module["name"]].codebook.name == module["codebook"]
    first = next(module for module in document["modules"] if module["name"] == f"{BANK}.0.gate_proj")
    assert first["measured"] == {"e2m1@1": 0.25, "e2m1@2": 0.0625, "int5@3": 0.015625}
    fused = widened(moe_tensors()[f"{BANK}.gate_up_proj"])[0, :32].astype(np.float64)
    assert math.isclose(first["sum_of_squares"], float((fused**2).sum()), rel_tol=1e-12)


def test_an_existing_output_is_replaced_on_request_only(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    recipe = write_recipe(tmp_path, 'match = "*_proj"\ncodebook = "e2m1@2"')
    quantize_checkpoint(dense, out, recipe=recipe)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(OutputExistsError, match="--force replaces it"):
        quantize_checkpoint(dense, out, recipe=recipe, seed=1)
    with pytest.raises(OutputExistsError):
        quantize_checkpoint(dense, out, recipe=recipe, seed=1, resume=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    quantize_checkpoint(dense, out, recipe=recipe, seed=1, force=True)
    _check(out)
    assert stored_block(out)["source"]["seed"] == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(OutputExistsError):
        quantize_checkpoint(dense, tmp_path / "other", recipe=recipe, force=True)
    assert (tmp_path / "other" / "thesis.txt").read_text() == "mine"


def test_a_source_without_a_config(tmp_path: Path) -> None:
    draft = dense_draft()
    draft.config = None
    quantize_checkpoint(draft.write(tmp_path / "m"), tmp_path / "out", bits=2)
    _check(tmp_path / "out")


def test_an_unknown_architecture_needs_patterns_only(tmp_path: Path) -> None:
    draft = dense_draft(config={"model_type": "homemade"})
    draft["h.0.c_fc.weight"] = matrix("fc", 128, 64)
    recipe = write_recipe(tmp_path, 'match = "h.*.c_fc"\ncodebook = "e2m1@2"')
    quantize_checkpoint(draft.write(tmp_path / "m"), tmp_path / "out", recipe=recipe)
    _check(tmp_path / "out")
    assert list(stored_block(tmp_path / "out")["modules"]) == ["h.0.c_fc"]


def test_repeated_tensors_are_written_once(tmp_path: Path) -> None:
    draft = dense_draft()
    name = "model.layers.0.self_attn.o_proj.weight"
    draft.shards["model-00002-of-00002.safetensors"][name] = draft[name]
    draft.index = None
    source = draft.write(tmp_path / "m")
    quantize_checkpoint(
        source, tmp_path / "out", recipe=write_recipe(tmp_path, 'match = "*_proj"\ncodebook = "e2m1@2"')
    )
    _check(tmp_path / "out")


def test_bfloat16_of_a_wide_bias_and_values(tmp_path: Path) -> None:
    """Biases of encoded modules stay as they are in Espalier."""
    draft = dense_draft()
    draft["model.layers.0.mlp.up_proj.bias"] = Tensor.of(values("b", (96,)), "F32")
    quantize_checkpoint(draft.write(tmp_path / "m"), tmp_path / "out", bits=2)
    _check(tmp_path / "out")
    for name in ("model.layers.0.mlp.up_proj.bias", "model.layers.0.self_attn.q_proj.bias"):
        assert stored_tensors(tmp_path / "out")[name] == draft[name]


def test_small_tensors_that_stay_are_read_in_large_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading for each of tens of thousands of them would take longer than the rest of the copy."""
    draft = dense_draft()
    for number in range(300):
        draft[f"model.layers.{number}.norm.weight"] = bf16(values(f"norm {number}", (64,)))
        draft.shards["model-00001-of-00002.safetensors"][f"a.{number}.norm.weight"] = bf16(values(f"a {number}", (64,)))
    source = draft.write(tmp_path / "m")
    readings: list[str] = []
    chunks = Shard.chunks

    def counted(self: Shard, start: int, end: int, *size: int) -> Iterator[bytes]:
        if self.path.parent == source:
            readings.append(self.name)
        return chunks(self, start, end, *size)

    monkeypatch.setattr(Shard, "chunks", counted)
    recipe = write_recipe(tmp_path, 'match = ["lm_head", "*.down_proj"]\ncodebook = "e2m1@2"')
    quantize_checkpoint(source, tmp_path / "out", recipe=recipe)
    assert len(readings) < 30
    written = stored_tensors(tmp_path / "out")
    encoded = {"lm_head.weight", "model.layers.0.mlp.down_proj.weight"}
    assert all(written[name] == draft[name] for name in draft.names() if name not in encoded)


def test_banks_are_those_that_a_converter_makes(tmp_path: Path) -> None:
    """By spec/exl3.md §5: any projection counts the experts, and all of one need the same sizes and rotation."""
    draft, bank = dense_draft(), "model.layers.0.mlp.experts"
    for layer, missing in ((0, None), (1, (3, "up_proj")), (2, None)):
        for expert in range(4):
            for projection, sizes in (("up_proj", (96, 64)), ("down_proj", (64, 96))):
                if (expert, projection) != missing:
                    name = f"{bank.replace('0', str(layer))}.{expert}.{projection}"
                    draft[f"{name}.weight"] = matrix(name, *sizes)
    recipe = write_recipe(
        tmp_path,
        'match = "*.layers.2.mlp.experts.1.up_proj"\ncodebook = "e2m1@2"\nrotation = 64',
        'match = "*.experts.*.up_proj"\ncodebook = "e2m1@2"\nrotation = 32',
    )
    quantize_checkpoint(draft.write(tmp_path / "m"), tmp_path / "out", recipe=recipe)
    _check(tmp_path / "out")
    block = stored_block(tmp_path / "out")
    assert {name: list(found["projections"]) for name, found in block["expert_banks"].items()} == {bank: ["up_proj"]}
    assert len(block["modules"]) == 3 + 4


def test_an_expert_with_another_spelling_of_its_number_is_beside_no_bank(tmp_path: Path) -> None:
    """A config cannot hold both: its name would be in the namespace of the bank."""
    draft, bank = dense_draft(), "model.layers.0.mlp.experts"
    for projection, numbers in (("up_proj", ("0", "1", "01")), ("gate_proj", ("0", "1"))):
        for number in numbers:
            draft[f"{bank}.{number}.{projection}.weight"] = matrix(number, 96, 64)
    recipe = write_recipe(tmp_path, 'match = "*.experts.*"\ncodebook = "e2m1@2"\nrotation = 32')
    quantize_checkpoint(draft.write(tmp_path / "m"), tmp_path / "out", recipe=recipe)
    _check(tmp_path / "out")
    block = stored_block(tmp_path / "out")
    assert list(block["expert_banks"][bank]["projections"]) == ["gate_proj"]
    assert set(block["modules"]) == {f"{bank}.{number}.up_proj" for number in ("0", "1", "01")}
