"""Which modules a source has, and that their weights are read from the right place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from builders import Exl3Module, Tensor, bf16, espalier_draft, exl3_draft, llama_config
from quantize_cases import dense_draft, matrix, moe_draft, moe_tensors, values, widened

from espalier_format.checkpoint import open_checkpoint
from espalier_format.checkpoint.text_sections import TEXT_PARTS
from espalier_format.errors import ShapeError, SourceError
from espalier_format.quantize.inventory import take_inventory
from espalier_format.quantize.linear import Linear


def _rows(linear: Linear) -> np.ndarray:
    """All rows, read in two unequal parts."""
    cut = linear.out_features // 3
    return np.concatenate([linear.matrix.rows(0, cut), linear.matrix.rows(cut, linear.out_features)])


def test_a_dense_model(dense: Path) -> None:
    draft = dense_draft()
    with open_checkpoint(dense) as source:
        found = take_inventory(source, exl3=False)
        names = [name.removesuffix(".weight") for name in draft.names() if "_proj.weight" in name or "head" in name]
        assert list(found) == names
        for name, linear in found.items():
            assert np.array_equal(_rows(linear), widened(draft[f"{name}.weight"])), name
            assert (linear.bias is not None) == name.endswith("q_proj")


@pytest.mark.parametrize("transposed", [False, True])
def test_fused_experts_are_taken_apart(transposed: bool, tmp_path: Path) -> None:
    straight = moe_tensors()
    moe_draft(transposed=transposed).write(tmp_path / "m")
    bank = "model.language_model.layers.0.mlp.experts"
    with open_checkpoint(tmp_path / "m") as source:
        found = take_inventory(source, exl3=False)
        for expert in range(4):
            gate_up = widened(straight[f"{bank}.gate_up_proj"])[expert]
            down = widened(straight[f"{bank}.down_proj"])[expert]
            for name, expected in (("gate_proj", gate_up[:32]), ("up_proj", gate_up[32:]), ("down_proj", down)):
                linear = found[f"{bank}.{expert}.{name}"]
                assert linear.matrix.shape == expected.shape
                assert np.array_equal(_rows(linear), expected), linear.name
                stored = np.frombuffer(linear.matrix.stored_rows(1, 5), "<u2").astype(np.uint32) << 16
                assert np.array_equal(stored.view(np.float32).reshape(4, -1), expected[1:5])


def test_what_decides_and_what_is_looked_up_is_no_linear_module(moe: Path) -> None:
    with open_checkpoint(moe) as source:
        found = take_inventory(source, exl3=False)
    for name in ("embed_tokens", "mlp.gate", "shared_expert_gate", "conv1d", "A_log"):
        assert not [linear for linear in found if linear.endswith(name)], name
    assert "mtp.fc" in found
    assert "model.visual.blocks.0.mlp.linear_fc1" in found
    assert "model.language_model.layers.0.linear_attn.in_proj_a" in found


def test_experts_of_their_own_tensors(tmp_path: Path) -> None:
    draft = dense_draft()
    draft["model.layers.0.mlp.experts.0.up_proj.weight"] = matrix("e0", 32, 64)
    draft["model.layers.0.mlp.experts.1.up_proj.weight"] = matrix("e1", 32, 64)
    with open_checkpoint(draft.write(tmp_path / "m")) as source:
        found = take_inventory(source, exl3=False)
        linear = found["model.layers.0.mlp.experts.1.up_proj"]
        assert np.array_equal(_rows(linear), widened(matrix("e1", 32, 64)))
        assert not linear.fused


@pytest.mark.parametrize(("dtype", "kind"), [("F16", np.float16), ("F32", np.float32), ("F64", np.float64)])
def test_other_dtypes(dtype: str, kind: type, tmp_path: Path) -> None:
    draft = dense_draft()
    numbers = values("other", (50, 64)).astype(kind)
    draft["lm_head.weight"] = Tensor.of(numbers, dtype)
    with open_checkpoint(draft.write(tmp_path / "m")) as source:
        rows = _rows(take_inventory(source, exl3=False)["lm_head"])
    assert rows.dtype == np.float32
    assert np.array_equal(rows, numbers.astype(np.float32))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.language_model.layers.0.mlp.experts.down_proj"])
def test_a_value_that_is_no_number_names_its_tensor(name: str, value: float, tmp_path: Path) -> None:
    draft = moe_draft()
    spoilt = widened(draft[name]).copy()
    spoilt[..., 7, 5] = value
    draft[name] = bf16(spoilt)
    module = "lm_head" if "head" in name else "model.language_model.layers.0.mlp.experts.2.down_proj"
    with open_checkpoint(draft.write(tmp_path / "m")) as source:
        linear = take_inventory(source, exl3=False)[module]
        linear.matrix.rows(0, 7)
        with pytest.raises(SourceError, match="cannot be quantized") as caught:
            linear.matrix.rows(0, 10)
    assert caught.value.tensor == name


def test_a_tied_head_has_the_weight_of_the_embedding(tmp_path: Path) -> None:
    draft = dense_draft(tied=True)
    with open_checkpoint(draft.write(tmp_path / "m")) as source:
        linear = take_inventory(source, exl3=False)["lm_head"]
        assert linear.tied
        assert np.array_equal(_rows(linear), widened(draft["model.embed_tokens.weight"]))


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"tie_word_embeddings": True}, "lm_head"),
        ({"tie_word_embeddings": False}, None),
        ({"tie_word_embeddings": None}, "lm_head"),
        ({"tie_word_embeddings": None, "architectures": ["LlamaModel"]}, None),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, "lm_head"),
    ],
)
def test_whether_there_is_a_tied_head(config: dict[str, object], found: str | None, tmp_path: Path) -> None:
    draft = dense_draft(tied=True, config=config)
    with open_checkpoint(draft.write(tmp_path / "m")) as source:
        heads = [name for name in take_inventory(source, exl3=False) if "head" in name]
    assert heads == ([found] if found else [])


def test_quantized_sources_are_decoded(tmp_path: Path) -> None:
    modules = [
        Exl3Module("model.layers.0.mlp.up_proj", 96, 200, 2, "mul1"),
        Exl3Module("lm_head", 96, 90, 4, "mcg"),
    ]
    config = llama_config(hidden=96, intermediate=200)
    exl3 = exl3_draft(modules, config=config).write(tmp_path / "exl3")
    for folder in (exl3, espalier_draft().write(tmp_path / "espalier")):
        with open_checkpoint(folder) as source:
            found = take_inventory(source, exl3=False)
            assert set(source.modules) <= set(found)
            for name, module in source.modules.items():
                expected = source.decode(name)
                assert found[name].matrix.shape == (module.out_features, module.in_features)
                assert np.array_equal(_rows(found[name]), expected), name
                assert np.array_equal(found[name].matrix.rows(33, 38), expected[33:38])


def test_the_other_quantizations_are_refused(tmp_path: Path) -> None:
    draft = dense_draft(config={"quantization_config": {"quant_method": "quark"}})
    with (
        open_checkpoint(draft.write(tmp_path / "m")) as source,
        pytest.raises(SourceError, match="quantized by 'quark'"),
    ):
        take_inventory(source, exl3=False)


def test_and_one_that_is_not_named(tmp_path: Path) -> None:
    draft = dense_draft(config={"quantization_config": {"bits": 4}})
    with (
        open_checkpoint(draft.write(tmp_path / "m")) as source,
        pytest.raises(SourceError, match="quantization_config names no quant_method, so it is not known"),
    ):
        take_inventory(source, exl3=False)


@pytest.mark.parametrize("part", TEXT_PARTS)
def test_also_where_a_text_part_names_them(part: str, tmp_path: Path) -> None:
    draft = dense_draft(config={part: {"quantization_config": {"quant_method": "fp8"}}})
    with (
        open_checkpoint(draft.write(tmp_path / "m")) as source,
        pytest.raises(SourceError, match=rf"quantized by 'fp8' \(so says {part}.quantization_config\)"),
    ):
        take_inventory(source, exl3=False)


@pytest.mark.parametrize("second", ["scales", "qzeros"])
def test_or_where_only_the_tensors_tell(second: str, tmp_path: Path) -> None:
    """GPTQ whose config is in quantize_config.json: copied as they are, the tensors would mean nothing any more."""
    draft = dense_draft()
    module = "model.layers.0.mlp.down_proj"
    del draft[f"{module}.weight"]
    draft[f"{module}.qweight"] = Tensor("I32", (12, 64), bytes(4 * 12 * 64))
    draft[f"{module}.{second}"] = Tensor("I32", (1, 8), bytes(32))
    with (
        open_checkpoint(draft.write(tmp_path / "m")) as source,
        pytest.raises(SourceError, match=f"to judge by {module}.{second}, in a way that is not read") as caught,
    ):
        take_inventory(source, exl3=False)
    assert caught.value.tensor == f"{module}.qweight"
    assert str(caught.value.path).endswith(".safetensors")


def test_what_does_not_count_refuses_nothing(tmp_path: Path) -> None:
    """EXL3 made from FP8 often keeps that in the text part; loaders look at the top level first."""
    draft = exl3_draft([Exl3Module("lm_head", 96, 90, 4, "mcg")], config=llama_config(hidden=96, intermediate=200))
    assert draft.config is not None
    draft.config["text_config"] = {**draft.config, "quantization_config": {"quant_method": "fp8"}}
    with open_checkpoint(draft.write(tmp_path / "m")) as source:
        assert "lm_head" in take_inventory(source, exl3=False)


def test_fused_experts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    draft = moe_draft()
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    draft[name] = bf16(values("d", (4, 64, 33)))
    with (
        open_checkpoint(draft.write(tmp_path / "m")) as source,
        pytest.raises(ShapeError, match="do not fit those of") as caught,
    ):
        take_inventory(source, exl3=False)
    assert caught.value.tensor == "model.language_model.layers.0.mlp.experts.gate_up_proj"


def test_a_bias_of_another_size_is_refused(tmp_path: Path) -> None:
    draft = dense_draft()
    draft["model.layers.0.self_attn.q_proj.bias"] = bf16(values("b", (63,)))
    with open_checkpoint(draft.write(tmp_path / "m")) as source, pytest.raises(ShapeError, match="bias"):
        take_inventory(source, exl3=False)


@pytest.mark.parametrize("part", [None, *TEXT_PARTS])
def test_interleaved_experts_are_left_alone(part: str | None, tmp_path: Path) -> None:
    draft = moe_draft()
    assert draft.config is not None
    draft.config.update({"model_type": "gpt_oss"} if part is None else {part: {"model_type": "gpt_oss"}})
    with open_checkpoint(draft.write(tmp_path / "m")) as source:
        assert not [name for name in take_inventory(source, exl3=False) if ".experts." in name]


def test_exl3_takes_dense_projections_apart(tmp_path: Path) -> None:
    draft = dense_draft(config={"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16})
    for part in ("q_proj", "k_proj", "v_proj"):
        del draft[f"model.layers.0.self_attn.{part}.weight"]
    for part in ("gate_proj", "up_proj"):
        del draft[f"model.layers.0.mlp.{part}.weight"]
    del draft["model.layers.0.self_attn.q_proj.bias"]
    qkv, gate_up = matrix("qkv", 128, 64), matrix("gate_up", 96, 64)
    draft["model.layers.0.self_attn.qkv_proj.weight"] = qkv
    draft["model.layers.0.mlp.gate_up_proj.weight"] = gate_up
    with open_checkpoint(draft.write(tmp_path / "m")) as source:
        assert "model.layers.0.mlp.gate_up_proj" in take_inventory(source, exl3=False)
        found = take_inventory(source, exl3=True)
        expected = {
            "self_attn.q_proj": widened(qkv)[:64],
            "self_attn.k_proj": widened(qkv)[64:96],
            "self_attn.v_proj": widened(qkv)[96:],
            "mlp.gate_proj": widened(gate_up)[:48],
            "mlp.up_proj": widened(gate_up)[48:],
        }
        for name, rows in expected.items():
            assert np.array_equal(_rows(found[f"model.layers.0.{name}"]), rows)
        assert "model.layers.0.mlp.gate_up_proj" not in found
