"""What does not fit raises, before anybody has the model: each reason with its class of error.

Without an error transformers would give all of these checkpoints to the user, with random weights where something is
missing; the last test shows it.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from builders import Draft, Tensor, bf16
from hf_models import Family
from runtime_models import LLAMA, QWEN2, QWEN3_MOE, QWEN35_MOE, BankRecipe, espalier_model

from espalier_format import errors
from espalier_format.errors import EspalierError
from espalier_format.runtimes import transformers as runtime
from espalier_format.runtimes.transformers import banks, loading

AUTO = transformers.AutoModelForCausalLM
DRAFTS: dict[str, Any] = {
    "llama": (LLAMA, {"num_shards": 2}),
    "qwen2": (QWEN2, {}),
    "moe": (QWEN3_MOE, {}),
    "moe-fused": (QWEN35_MOE, {"bank": BankRecipe(projections=["down_proj"], fused=True)}),
    "moe-down": (QWEN3_MOE, {"bank": BankRecipe(projections=["down_proj"])}),
}
Q_PROJ = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Draft]:
    made: dict[str, Draft] = {}

    def draft(name: str) -> Draft:
        if name not in made:
            family, options = DRAFTS[name]
            made[name] = espalier_model(family, tmp_path_factory.mktemp(name), **options)
        return copy.deepcopy(made[name])

    return draft


def test_the_drafts_themselves_load(drafts: Callable[[str], Draft], tmp_path: Path) -> None:
    for name in DRAFTS:
        AUTO.from_pretrained(drafts(name).write(tmp_path / name))


def config(draft: Draft) -> dict[str, Any]:
    assert draft.config is not None
    return draft.config


def codebook(draft: Draft) -> None:
    next(iter(draft.block["codebooks"].values()))["multiplier"] = "0x00000001"


def scale(draft: Draft, name: str, value: float) -> None:
    values = draft[name].array().copy()
    values[3] = value
    draft[name] = Tensor.of(values, "F16")


def shorter(draft: Draft, name: str) -> None:
    draft[name] = Tensor.of(draft[name].array()[:-16], "F16")


def widened(draft: Draft, name: str) -> None:
    draft[name] = Tensor.of(draft[name].array(), "F32")


def moved(draft: Draft, module: str, target: str) -> None:
    """Store a module under another name, config and tensors alike."""
    draft.block["modules"][target] = draft.block["modules"].pop(module)
    for name in draft.names():
        if name.startswith(f"{module}."):
            tensor = draft[name]
            del draft[name]
            draft.shards[next(reversed(draft.shards))][name.replace(module, target)] = tensor
            for metadata in draft.metadata.values():
                metadata.setdefault("espalier_format_version", "1")


def fewer_experts(draft: Draft) -> None:
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    draft[name] = Tensor.of(draft[name].array()[1:], "BF16")


def one_too_many(draft: Draft) -> None:
    draft.index = draft.right_index()
    draft.index["weight_map"]["model.bias"] = min(draft.shards)


def again(draft: Draft, name: str, other: str) -> None:
    """Store other values of a tensor under another name that transformers takes for the same."""
    draft[other] = bf16(np.full(draft[name].shape, 3.0))


Spoil = Callable[[Draft], Any]
CASES: dict[str, tuple[str, type[EspalierError], Spoil]] = {
    "version": ("llama", errors.FormatVersionError, lambda d: d.block.update(format_version=2)),
    "feature": ("llama", errors.FeatureError, lambda d: d.block.update(required_features=["new"])),
    "codebook": ("llama", errors.CodebookError, codebook),
    "schema": ("llama", errors.SchemaError, lambda d: d.block.update(more=1)),
    "missing-trellis": ("llama", errors.MissingTensorError, lambda d: d.__delitem__(f"{Q_PROJ}.esp_trellis")),
    "missing-scales": ("llama", errors.MissingTensorError, lambda d: d.__delitem__("lm_head.esp_svh")),
    "missing-expert": ("moe", errors.MissingTensorError, lambda d: d.__delitem__(f"{EXPERTS}.2.up_proj.esp_suh")),
    "extra-scales": (
        "llama", errors.UnexpectedTensorError,
        lambda d: d.__setitem__("model.norm.esp_suh", Tensor.of([1.0] * 32, "F16")),
    ),
    "dtype": ("llama", errors.DtypeError, lambda d: widened(d, f"{Q_PROJ}.esp_suh")),
    "shape": ("llama", errors.ShapeError, lambda d: shorter(d, f"{Q_PROJ}.esp_suh")),
    "nan": ("llama", errors.NonFiniteScaleError, lambda d: scale(d, f"{Q_PROJ}.esp_svh", float("nan"))),
    "infinite-expert": (
        "moe", errors.NonFiniteScaleError, lambda d: scale(d, f"{EXPERTS}.2.up_proj.esp_suh", float("inf")),
    ),
    "shard-version": ("llama", errors.FormatVersionError, lambda d: d.metadata.clear()),
    "index": ("llama", errors.IndexMismatchError, one_too_many),
    "missing-norm": ("llama", errors.MissingTensorError, lambda d: d.__delitem__("model.norm.weight")),
    "missing-embedding": ("llama", errors.MissingTensorError, lambda d: d.__delitem__("model.embed_tokens.weight")),
    "missing-bias": ("qwen2", errors.MissingTensorError, lambda d: d.__delitem__(f"{Q_PROJ}.bias")),
    "missing-plain-expert": (
        "moe-down", errors.MissingTensorError, lambda d: d.__delitem__(f"{EXPERTS}.2.up_proj.weight"),
    ),
    "extra-bias": (
        "llama", errors.UnexpectedTensorError, lambda d: d.__setitem__(f"{Q_PROJ}.bias", bf16([0.0] * 64)),
    ),
    "extra-plain": (
        "llama", errors.UnexpectedTensorError, lambda d: d.__setitem__("model.layers.0.gate.weight", bf16([0.0] * 64)),
    ),
    "plain-shape": (
        "llama", errors.ShapeError, lambda d: d.__setitem__("model.norm.weight", bf16([0.0] * 63)),
    ),
    "unknown-module": (
        "llama", errors.UnexpectedTensorError, lambda d: moved(d, Q_PROJ, "model.layers.0.self_attn.g_proj"),
    ),
    "no-linear-layer": ("llama", errors.SourceError, lambda d: moved(d, Q_PROJ, "model.layers.0.mlp.act_fn")),
    "fewer-layers": ("llama", errors.UnexpectedTensorError, lambda d: config(d).update(num_hidden_layers=1)),
    "more-layers": ("llama", errors.MissingTensorError, lambda d: config(d).update(num_hidden_layers=3)),
    "fewer-layers-of-experts": ("moe", errors.UnexpectedTensorError, lambda d: config(d).update(num_hidden_layers=1)),
    "size": ("llama", errors.ShapeError, lambda d: config(d).update(intermediate_size=128)),
    "size-of-experts": ("moe", errors.ShapeError, lambda d: config(d).update(moe_intermediate_size=64)),
    "fewer-fused-experts": ("moe-fused", errors.ShapeError, fewer_experts),
    "number-of-experts": ("moe", errors.ShapeError, lambda d: config(d).update(num_local_experts=5)),
    "activation": ("moe", errors.SourceError, lambda d: config(d).update(hidden_act="gelu")),
    "tied": ("llama", errors.SchemaError, lambda d: config(d).update(tie_word_embeddings=True)),
    "second-embedding": (
        "llama", errors.DuplicateTensorError,
        lambda d: again(d, "model.embed_tokens.weight", "embed_tokens.weight"),
    ),
    "second-norm": (
        "llama", errors.DuplicateTensorError,
        lambda d: again(d, "model.layers.0.input_layernorm.weight", "layers.0.input_layernorm.weight"),
    ),
    "second-last-norm": (
        "llama", errors.DuplicateTensorError, lambda d: again(d, "model.norm.weight", "norm.weight"),
    ),
    "prefix-twice": (
        "llama", errors.DuplicateTensorError,
        lambda d: again(d, "model.embed_tokens.weight", "model.model.embed_tokens.weight"),
    ),
    "second-bias": (
        "qwen2", errors.DuplicateTensorError,
        lambda d: again(d, f"{Q_PROJ}.bias", "layers.0.self_attn.q_proj.bias"),
    ),
    "second-router": (
        "moe", errors.DuplicateTensorError,
        lambda d: again(d, "model.layers.0.mlp.gate.weight", "layers.0.mlp.gate.weight"),
    ),
    "expert-one-by-one-and-fused": (
        "moe-down", errors.DuplicateTensorError,
        lambda d: d.__setitem__(f"{EXPERTS}.gate_up_proj", bf16(np.zeros((4, 96, 64)))),
    ),
    "more-experts": (
        "moe", errors.UnexpectedTensorError,
        lambda d: d.__setitem__(f"{EXPERTS}.7.up_proj.weight", bf16(np.zeros((48, 64)))),
    ),
    "expert-under-a-second-name": (
        "moe", errors.UnexpectedTensorError,
        lambda d: d.__setitem__("layers.1.mlp.experts.2.up_proj.weight", bf16(np.zeros((48, 64)))),
    ),
    "copy-of-an-expert-of-another-shape": (
        "moe", errors.UnexpectedTensorError,
        lambda d: d.__setitem__(f"{EXPERTS}.2.up_proj.weight", bf16(np.zeros((64, 48)))),
    ),
    "fused-experts-beside": (
        "moe", errors.UnexpectedTensorError,
        lambda d: d.__setitem__(f"{EXPERTS}.gate_up_proj", bf16(np.zeros((4, 96, 64)))),
    ),
    "copy-of-another-shape": (
        "llama", errors.UnexpectedTensorError, lambda d: d.__setitem__(f"{Q_PROJ}.weight", bf16(np.zeros((64, 63)))),
    ),
    "copy-under-a-second-name": (
        "llama", errors.UnexpectedTensorError,
        lambda d: d.__setitem__("layers.0.self_attn.q_proj.weight", bf16(np.zeros((64, 64)))),
    ),
    "turned": (
        "llama", errors.ShapeError, lambda d: d.__setitem__("model.embed_tokens.weight", bf16(np.zeros((64, 70)))),
    ),
    "one-more-dimension": (
        "llama", errors.ShapeError, lambda d: d.__setitem__("model.norm.weight", bf16(np.zeros((1, 64)))),
    ),
    "integers": (
        "llama", errors.DtypeError, lambda d: d.__setitem__("model.norm.weight", Tensor.of([1] * 64, "I16")),
    ),
}  # fmt: skip


@pytest.mark.capability("transformers", "refuses what does not fit")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("options", [{}, {"ignore_mismatched_sizes": True}], ids=["plain", "ignore"])
def test_refused(case: str, options: dict[str, Any], drafts: Callable[[str], Draft], tmp_path: Path) -> None:
    """With ``ignore_mismatched_sizes``, which makes transformers put up with more, as well."""
    name, error, spoil = CASES[case]
    draft = drafts(name)
    spoil(draft)
    folder = draft.write(tmp_path / "spoilt")
    with pytest.raises(error) as refusal:
        AUTO.from_pretrained(folder, **options)
    assert type(refusal.value) is error
    with pytest.raises(error):
        runtime.load(folder, **options)


def test_a_plain_copy_of_a_quantized_weight(drafts: Callable[[str], Draft], tmp_path: Path) -> None:
    """spec/espalier-v1.md §5: it may stand beside the quantized one, which is used."""
    ids = torch.arange(3, 19)[None]
    for name, copied, shape in (("llama", Q_PROJ, (64, 64)), ("moe", f"{EXPERTS}.2.up_proj", (48, 64))):
        draft = drafts(name)
        with torch.no_grad():
            expected = runtime.load(draft.write(tmp_path / name))(ids).logits
            draft[f"{copied}.weight"] = bf16(np.full(shape, 3.0))
            found = runtime.load(draft.write(tmp_path / f"{name}-copy"))(ids).logits
        assert torch.equal(found, expected)


@pytest.mark.parametrize("offloaded", [False, True], ids=["memory", "disk"])
def test_a_plain_tensor_that_overflows(drafts: Callable[[str], Draft], tmp_path: Path, offloaded: bool) -> None:
    """In a dtype that holds the value it is loaded, and an infinity that the checkpoint itself has stays one."""
    if offloaded:
        pytest.importorskip("accelerate")
    name = "model.layers.0.input_layernorm.weight"
    draft = drafts("llama")
    draft[name] = Tensor.of(np.full(64, 1e6), "F32")
    folder = draft.write(tmp_path / "large")
    places = {"model.layers.0": "disk", "model.layers.1": "cpu"} if offloaded else {}
    device_map = {**places, "model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu",
        "lm_head": "cpu"} if offloaded else None  # fmt: skip
    options = {"device_map": device_map, "offload_folder": str(tmp_path / "offload")} if offloaded else {}
    with pytest.raises(errors.ScaleOverflowError) as refusal:
        AUTO.from_pretrained(folder, dtype=torch.float16, **options)
    assert refusal.value.tensor == name
    AUTO.from_pretrained(folder, dtype=torch.bfloat16, **options)
    draft[name] = Tensor.of(np.full(64, np.inf), "F32")
    AUTO.from_pretrained(draft.write(tmp_path / "infinite"), dtype=torch.float16, **options)


@pytest.mark.parametrize(("kind", "module"), [("llama", Q_PROJ), ("llama", "lm_head"), ("moe", f"{EXPERTS}.2.up_proj")])
def test_a_quantized_weight_that_overflows(
    kind: str, module: str, drafts: Callable[[str], Draft], tmp_path: Path
) -> None:
    """When the model is loaded, as operators on a GPU do not look at values; in bfloat16 there is nothing wrong."""
    draft = drafts(kind)
    for side in ("esp_suh", "esp_svh"):
        draft[f"{module}.{side}"] = Tensor.of(np.full(draft[f"{module}.{side}"].shape, 600.0), "F16")
    folder = draft.write(tmp_path / "large")
    with pytest.raises(errors.ScaleOverflowError, match="float16") as refusal:
        AUTO.from_pretrained(folder, dtype=torch.float16)
    assert module.rpartition(".")[2] in str(refusal.value)
    AUTO.from_pretrained(folder, dtype=torch.bfloat16)


def test_resizing_the_vocabulary(drafts: Callable[[str], Draft], tmp_path: Path) -> None:
    """The model is as it was: transformers would have resized the embedding before it fails."""
    model: Any = AUTO.from_pretrained(drafts("llama").write(tmp_path / "llama"))
    with pytest.raises(errors.UsageError, match="quantized head"):
        model.resize_token_embeddings(80)
    assert model.get_input_embeddings().weight.shape[0] == 70
    copy.deepcopy(model)


def test_experts_that_compute_something_else(drafts: Callable[[str], Draft], tmp_path: Path, monkeypatch: Any) -> None:
    """No look at a class shows what it computes, so the known ones are listed."""
    folder = drafts("moe").write(tmp_path / "moe")
    monkeypatch.setattr(banks, "EXPERT_CLASSES", frozenset({"Qwen2MoeExperts"}))
    with pytest.raises(errors.SourceError, match="experts of the class Qwen3MoeExperts are not supported"):
        AUTO.from_pretrained(folder)


def test_fused_experts_of_unknown_orientation(tmp_path: Path) -> None:
    """gate_up_proj of 2 x 32 outputs and 64 inputs, stored plain where down_proj is quantized."""
    family = Family(QWEN35_MOE.model_type, QWEN35_MOE.config, {**(QWEN35_MOE.text or {}), "moe_intermediate_size": 32},
        QWEN35_MOE.auto)  # fmt: skip
    draft = espalier_model(family, tmp_path / "source", bank=BankRecipe(projections=["down_proj"], fused=True))
    with pytest.raises(errors.SourceError, match="orientation"):
        AUTO.from_pretrained(draft.write(tmp_path / "made"))


def test_a_shard_that_is_not_there(drafts: Callable[[str], Draft], tmp_path: Path) -> None:
    folder = drafts("llama").write(tmp_path / "llama")
    (folder / "model-00002-of-00002.safetensors").unlink()
    for load in (runtime.load, AUTO.from_pretrained):
        with pytest.raises(errors.IndexMismatchError, match="is the download complete"):
            load(folder)


def test_a_shard_that_transformers_does_not_read(drafts: Callable[[str], Draft], tmp_path: Path) -> None:
    """It takes model.safetensors for all of a checkpoint, whatever the index says."""
    draft = drafts("llama")
    draft.shards = dict(zip(("model.safetensors", "more.safetensors"), draft.shards.values(), strict=True))
    draft.metadata = dict.fromkeys(draft.shards, next(iter(draft.metadata.values())))
    with pytest.raises(errors.IndexMismatchError, match=r"reads model\.safetensors and not more\.safetensors"):
        AUTO.from_pretrained(draft.write(tmp_path / "llama"))


def test_a_model_class_with_a_head_of_its_own(drafts: Callable[[str], Draft], tmp_path: Path) -> None:
    folder = drafts("llama").write(tmp_path / "llama")
    with pytest.raises(errors.MissingTensorError, match=r"score\.weight"):
        transformers.AutoModelForSequenceClassification.from_pretrained(folder)


def test_options_that_cannot_be(drafts: Callable[[str], Draft], tmp_path: Path) -> None:
    folder = drafts("moe").write(tmp_path / "moe")
    with pytest.raises(errors.UsageError, match="float64"):
        AUTO.from_pretrained(folder, dtype=torch.float64)
    found = transformers.AutoConfig.from_pretrained(folder)
    with pytest.raises(errors.UsageError, match="from its folder"):
        transformers.Qwen3MoeForCausalLM.from_pretrained(None, config=found, state_dict={})
    found.quantization_config["producer"]["version"] = "2"
    with pytest.raises(errors.SchemaError, match="the given config"):
        AUTO.from_pretrained(folder, config=found)
    with pytest.raises(errors.UsageError, match="output_loading_info"):
        runtime.load(folder, output_loading_info=True)


def test_a_plain_checkpoint(drafts: Callable[[str], Draft], tmp_path: Path) -> None:
    """It can be loaded as such, but neither quantized meanwhile nor taken for Espalier."""
    block = transformers.AutoConfig.from_pretrained(drafts("llama").write(tmp_path / "e")).quantization_config
    espalier_model(LLAMA, tmp_path / "plain")
    AUTO.from_pretrained(tmp_path / "plain")
    with pytest.raises(errors.UsageError, match="cannot quantize"):
        AUTO.from_pretrained(tmp_path / "plain", quantization_config=runtime.EspalierConfig.from_dict(block))
    with pytest.raises(errors.SourceError, match="of the format plain"):
        runtime.load(tmp_path / "plain")


def test_saving_and_decoding(drafts: Callable[[str], Draft], tmp_path: Path) -> None:
    """A file of an incomplete checkpoint is not even begun."""
    folder = drafts("llama").write(tmp_path / "llama")
    model = AUTO.from_pretrained(folder)
    with pytest.raises(errors.UsageError, match="copy that"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    with pytest.raises(errors.UsageError, match="convert --to hf"):
        model.dequantize()


def test_tensor_parallelism(drafts: Callable[[str], Draft], tmp_path: Path) -> None:
    """As from_pretrained does it under torchrun: the config says so when modules are replaced."""
    folder = drafts("llama").write(tmp_path / "llama")
    found = transformers.AutoConfig.from_pretrained(folder)
    found.distributed_config = {"tp_size": 2}
    with pytest.raises(errors.UsageError, match="tensor parallelism"):
        AUTO.from_pretrained(folder, config=found)


def test_a_release_of_transformers_that_makes_no_account(
    drafts: Callable[[str], Draft], tmp_path: Path, monkeypatch: Any
) -> None:
    folder = drafts("llama").write(tmp_path / "llama")
    # The second is a method that is there and gets no account.
    for method in ("_no_such_method", "push_to_hub"):
        monkeypatch.setattr(loading, "_ACCOUNT", method)
        with pytest.raises(errors.DependencyError, match=r"5\.17 to 5\.24"):
            AUTO.from_pretrained(folder)


def test_a_release_of_transformers_that_does_not_say_how_it_renames(
    drafts: Callable[[str], Draft], tmp_path: Path, monkeypatch: Any
) -> None:
    folder = drafts("llama").write(tmp_path / "llama")
    monkeypatch.setattr(runtime.EspalierQuantizer, "update_weight_conversions", lambda _self, given, *_: given)
    with pytest.raises(errors.DependencyError, match=r"5\.17 to 5\.24"):
        AUTO.from_pretrained(folder)


WITHOUT = """
import sys, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(type(model.model.layers[0].self_attn.q_proj).__name__)
"""


def test_without_the_package_transformers_loads_random_weights(drafts: Callable[[str], Draft], tmp_path: Path) -> None:
    """Why `load` exists, and why the import must not be forgotten. A config without its block is the same case."""
    draft = drafts("llama")
    folder = draft.write(tmp_path / "llama")
    output = subprocess.run([sys.executable, "-c", WITHOUT, str(folder)], check=True, capture_output=True, text=True)
    assert output.stdout.strip() == "Linear"
    del config(draft)["quantization_config"]
    spoilt = draft.write(tmp_path / "spoilt")
    AUTO.from_pretrained(spoilt)
    with pytest.raises(errors.FormatVersionError, match="has no quantization_config"):
        runtime.load(spoilt)
