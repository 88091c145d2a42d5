"""What vLLM must not load, and what it says instead."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
from builders import Draft, bf16
from hf_models import Family
from vllm_engine import STAND_INS, TWO_RANKS, generate, refusal
from vllm_models import LLAMA, QWEN3_MOE, QWEN35_MOE, SMALL, WHOLE, checkpoint, with_plain_bank, without

DOWN = "model.layers.1.mlp.down_proj"
BANK = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Draft:
    return checkpoint(LLAMA, tmp_path_factory.mktemp("llama"))


def test_without_the_plugin(llama: Draft, tmp_path: Path) -> None:
    """vLLM's own refusal, before a weight is read."""
    message = refusal(llama.write(tmp_path / "espalier"), {"VLLM_PLUGINS": "another"})
    assert "Unknown quantization method: espalier" in message


def test_another_version(llama: Draft, tmp_path: Path) -> None:
    draft = copy.deepcopy(llama)
    draft.block["format_version"] = 2
    message = refusal(draft.write(tmp_path / "espalier"))
    assert "FormatVersionError" in message
    assert "format_version is 2" in message


def test_a_required_feature(llama: Draft, tmp_path: Path) -> None:
    draft = copy.deepcopy(llama)
    draft.block["required_features"] = ["telepathy"]
    assert "telepathy" in refusal(draft.write(tmp_path / "espalier"))


@pytest.mark.capability("vLLM", "refuses what does not fit")
def test_a_missing_tensor(llama: Draft, tmp_path: Path) -> None:
    """vLLM alone would go on with whatever was in memory."""
    message = refusal(without(llama, f"{DOWN}.esp_trellis").write(tmp_path / "espalier"))
    assert f"MissingTensorError: {DOWN}.esp_trellis" in message


@pytest.mark.capability("vLLM", "refuses what does not fit")
def test_an_extra_tensor(llama: Draft, tmp_path: Path) -> None:
    draft = copy.deepcopy(llama)
    draft["model.layers.9.mlp.down_proj.esp_suh"] = llama[f"{DOWN}.esp_suh"]
    message = refusal(draft.write(tmp_path / "espalier"))
    assert "UnexpectedTensorError" in message
    assert "model.layers.9.mlp.down_proj.esp_suh" in message


def test_a_plain_tensor_that_the_index_names(llama: Draft, tmp_path: Path) -> None:
    draft = without(llama, "model.layers.0.input_layernorm.weight")
    draft.index = llama.right_index()
    message = refusal(draft.write(tmp_path / "espalier"))
    assert "IndexMismatchError" in message
    assert "model.layers.0.input_layernorm.weight" in message


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"])
@pytest.mark.capability("vLLM", "refuses what does not fit")
def test_a_plain_tensor_that_nothing_names(llama: Draft, name: str, tmp_path: Path) -> None:
    """Neither the index nor a manifest tells: only after loading it shows."""
    message = refusal(without(llama, name).write(tmp_path / "espalier"))
    assert f"MissingTensorError: {name}: vLLM has found nothing for this parameter of the model" in message


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Draft:
    """Experts of the second layer are plain."""
    return with_plain_bank(checkpoint(QWEN3_MOE, tmp_path_factory.mktemp("qwen3_moe")), BANK)


def test_a_plain_expert_of_the_second_rank(experts: Draft, tmp_path: Path) -> None:
    """The rank has two of the four, and numbers them from zero."""
    name = f"{BANK}.2.down_proj.weight"
    folder = without(experts, name).write(tmp_path / "espalier")
    message = refusal(folder, **TWO_RANKS, enable_expert_parallel=True)
    assert f"MissingTensorError: {name}: vLLM has not found this weight" in message


def test_a_router(experts: Draft, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.gate.weight"
    message = refusal(without(experts, name).write(tmp_path / "espalier"))
    assert f"MissingTensorError: {name}: vLLM has found nothing" in message


def test_the_comparison_can_be_turned_off(llama: Draft, tmp_path: Path) -> None:
    """By vLLM's own option; what layers check themselves stays."""
    off = {"model_loader_extra_config": {"enable_weights_track": False}}
    generate(without(llama, "model.norm.weight").write(tmp_path / "espalier"), **off)
    message = refusal(without(llama, "model.embed_tokens.weight").write(tmp_path / "another"), **off)
    assert "MissingTensorError: the embedding.weight: vLLM has not found this weight" in message


def test_a_norm_of_a_drafter(tmp_path: Path) -> None:
    """It is a model of its own, which vLLM loads from the same checkpoint."""
    draft = checkpoint(QWEN35_MOE, tmp_path / "source")
    settings = {"dtype": "bfloat16", "speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    message = refusal(
        without(draft, "mtp.layers.0.self_attn.q_norm.weight").write(tmp_path / "espalier"),
        {"PYTHONPATH": str(STAND_INS)},
        **settings,
    )
    assert "MissingTensorError: model.layers.0.self_attn.q_norm.weight: vLLM has found nothing" in message


def test_a_shard_of_another_size_than_the_manifest_says(llama: Draft, tmp_path: Path) -> None:
    draft = without(llama, "model.norm.weight")
    entry = {"size": 123, "sha256": "0" * 64, "git_blob_sha1": "0" * 40}
    manifest = {"manifest_version": 1, "producer": {"name": "test", "version": "1"}, "decode_digests": {}}
    draft.files["espalier_manifest.json"] = json.dumps(
        {**manifest, "files": dict.fromkeys(draft.shards, entry)}
    ).encode()
    assert "DigestError" in refusal(draft.write(tmp_path / "espalier"))


def test_a_bias_that_the_model_has_not(llama: Draft, tmp_path: Path) -> None:
    """vLLM alone would leave it out."""
    draft = copy.deepcopy(llama)
    draft[f"{DOWN}.bias"] = bf16(np.ones(SMALL["hidden_size"]))
    message = refusal(draft.write(tmp_path / "espalier"))
    assert f"UnexpectedTensorError: {DOWN}.bias" in message


def test_a_tied_head_that_is_quantized(llama: Draft, tmp_path: Path) -> None:
    draft = copy.deepcopy(llama)
    assert draft.config is not None
    draft.config["tie_word_embeddings"] = True
    assert "tie_word_embeddings must be false" in refusal(draft.write(tmp_path / "espalier"))


def test_another_size_than_the_model_has(llama: Draft, tmp_path: Path) -> None:
    draft = copy.deepcopy(llama)
    assert draft.config is not None
    draft.config["intermediate_size"] = 320
    message = refusal(draft.write(tmp_path / "espalier"))
    assert "ShapeError: model.layers.0.mlp.gate_proj: the module has another size than the layer" in message


@pytest.mark.capability("vLLM", "refuses what does not fit")
def test_a_split_that_cuts_a_block(tmp_path: Path) -> None:
    """Of 64 key features for two ranks; the message says where, and why."""
    draft = checkpoint(Family("llama", SMALL), tmp_path / "source", WHOLE)
    message = refusal(draft.write(tmp_path / "espalier"), **TWO_RANKS)
    assert "within a rotation block of" in message
    assert "a rank would hold" in message


def test_a_split_that_cuts_a_block_of_experts(tmp_path: Path) -> None:
    """32 of 64 intermediate features, and a block of 64."""
    from runtime_models import BankRecipe

    draft = checkpoint(QWEN3_MOE, tmp_path / "source", bank=BankRecipe(rotation=(64, 64)))
    message = refusal(draft.write(tmp_path / "espalier"), **TWO_RANKS)
    assert "model.layers.0.mlp.experts: a rank would hold 0 to 32 of the 64 out_features" in message
