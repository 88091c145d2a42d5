"""vLLM loads a folder by itself and generates what transformers generates from the decoded checkpoint.

Nothing is configured but the folder. float32 on both sides, so that tokens are equal and not only close. Not checked
here: a GPU, and any kernel but the CPU's.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Draft, Tensor, bf16
from vllm_engine import STAND_INS, TWO_RANKS, Answer, assert_same, generate, reference
from vllm_models import LLAMA, QWEN3_MOE, QWEN35_MOE, checkpoint, with_plain_bank

from espalier_format.operations.convert import convert_checkpoint

EXACT = 1e-4
"""Rounding of float32, far below the distance of two tokens."""

ROUNDED = 0.1
"""Rounding of bfloat16, from logits of about 4 on: a few units in the last place."""


@dataclass(frozen=True)
class Case:
    """A checkpoint, and what transformers says."""

    draft: Draft
    folder: Path
    decoded: Path
    expected: list[Answer]


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Make a checkpoint of a model type once."""
    families = {"llama": (LLAMA, "fp32"), "qwen3_moe": (QWEN3_MOE, "fp32"), "qwen3_5_moe": (QWEN35_MOE, "bf16")}

    @cache
    def make(name: str) -> Case:
        folder = tmp_path_factory.mktemp(name)
        family, dtype = families[name]
        draft = checkpoint(family, folder / "source")
        espalier, decoded = draft.write(folder / "espalier"), folder / "decoded"
        return Case(draft, espalier, decoded, reference(espalier, decoded, dtype))

    return make


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        pytest.param({}, {}, id="one process"),
        pytest.param({}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, id="engine in a subprocess"),
        pytest.param(TWO_RANKS, {}, id="two ranks"),
    ],
)
@pytest.mark.capability("vLLM", "Llama, tensor parallel 1 and 2")
def test_llama(case: Callable[[str], Case], options: dict[str, Any], environment: dict[str, str]) -> None:
    """Merged layers of parts with different codebooks and blocks, biases, and a head of 250 tokens that vLLM pads."""
    model = case("llama")
    layer = "model.layers.0.self_attn"
    kinds = {(m["codebook"], str(m["rotation"])) for n, m in model.draft.block["modules"].items() if layer in n}
    assert len(kinds) == 4
    assert np.any(model.draft[f"{layer}.o_proj.bias"].array())
    assert_same(generate(model.folder, environment, **options), model.expected, EXACT, 24)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="one process"),
        pytest.param(TWO_RANKS, id="two ranks"),
        pytest.param({**TWO_RANKS, "enable_expert_parallel": True}, id="experts over two ranks"),
    ],
)
@pytest.mark.capability("vLLM", "experts of mixed width, tensor and expert parallel")
def test_experts_of_mixed_width(case: Callable[[str], Case], options: dict[str, Any]) -> None:
    """Three widths in a bank, and one plain expert."""
    model = case("qwen3_moe")
    assert model.draft.block["expert_banks"]["model.layers.0.mlp.experts"]["projections"]["up_proj"][
        "assignment"
    ].count("-")
    assert_same(generate(model.folder, **options), model.expected, EXACT, 24)


@pytest.mark.parametrize(
    ("name", "options"), [("llama", {}), ("llama", TWO_RANKS), ("qwen3_moe", {})], ids=["llama", "two ranks", "experts"]
)
def test_plain_copies_of_quantized_weights(
    case: Callable[[str], Case], name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """spec/espalier-v1.md §5: of every layer, the head and all experts but the plain one, and they are not used."""
    draft = copy.deepcopy(case(name).draft)
    sizes = dict(draft.block["modules"])
    for bank, stated in draft.block.get("expert_banks", {}).items():
        for projection, each in stated["projections"].items():
            sizes |= {f"{bank}.{expert}.{projection}": each for expert in range(stated["num_experts"])}
    quantized = [module for module in sizes if f"{module}.esp_trellis" in draft.names()]
    assert "lm_head" in quantized or name != "llama"
    for module in quantized:
        draft[f"{module}.weight"] = bf16(np.full((sizes[module]["out_features"], sizes[module]["in_features"]), 3.0))
    assert_same(generate(draft.write(tmp_path / "espalier"), **options), case(name).expected, EXACT, 24)


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, id="one process"), pytest.param(TWO_RANKS, id="two ranks")],
)
def test_plain_experts(case: Callable[[str], Case], options: dict[str, Any], tmp_path: Path) -> None:
    """All experts of a layer are plain, so that vLLM computes them, in whatever order it keeps their weights.

    Not with the experts over two ranks: there vLLM's kernel for the CPU crashes, with the decoded checkpoint too.
    """
    folder = with_plain_bank(case("qwen3_moe").draft, "model.layers.1.mlp.experts").write(tmp_path / "espalier")
    assert_same(generate(folder, **options), reference(folder, tmp_path / "decoded", "fp32"), EXACT, 24)


def test_mixtral_names(case: Callable[[str], Case], tmp_path: Path) -> None:
    """Projections called w1, w2 and w3, in a model that vLLM renames: the same experts as those of a Qwen3-MoE."""
    from hf_models import Family
    from vllm_models import EXPERTS, SMALL

    sizes = {"num_local_experts": EXPERTS["num_experts"], "num_experts_per_tok": EXPERTS["num_experts_per_tok"]}
    family = Family("mixtral", {**SMALL, **sizes, "intermediate_size": EXPERTS["moe_intermediate_size"]})
    draft = checkpoint(family, tmp_path / "source")
    bank = "model.layers.0.block_sparse_moe.experts"
    own = case("qwen3_moe").draft
    other = own.block["expert_banks"]["model.layers.0.mlp.experts"]
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    draft.block["expert_banks"] = {
        bank: {**other, "projections": {names[name]: each for name, each in other["projections"].items()}}
    }
    for name in [name for name in draft.names() if name.startswith(f"{bank}.")]:
        del draft[name]
    for name in own.names():
        if name.startswith("model.layers.0.mlp.experts."):
            expert, projection, kind = name.split(".")[-3:]
            draft[f"{bank}.{expert}.{names[projection]}.{kind}"] = own[name]
    books = {module["codebook"] for module in draft.block["modules"].values()}
    for projection in other["projections"].values():
        books.update(projection["codebooks"])
    draft.block["codebooks"] = {
        book: {**own.block["codebooks"], **draft.block["codebooks"]}[book] for book in sorted(books)
    }
    folder = draft.write(tmp_path / "espalier")
    assert_same(generate(folder), reference(folder, tmp_path / "decoded", "fp32"), EXACT, 24)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="one process"),
        pytest.param(TWO_RANKS, id="two ranks"),
        pytest.param({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}, id="MTP"),
    ],
)
@pytest.mark.capability("vLLM", "Qwen3.5-MoE with MTP")
def test_qwen35_moe(case: Callable[[str], Case], options: dict[str, Any]) -> None:
    """Linear attention, shared and routed experts, against vLLM itself on the decoded checkpoint.

    vLLM's CPU kernels of linear attention take bfloat16 only, so log-probabilities differ by roundings, and tokens are
    compared where the choice was clear. After eight tokens or so those kernels do not agree with transformers, for the
    decoded checkpoint no more than for this one; so only the beginnings of two answers are compared with transformers.

    With MTP, vLLM loads the quantized MTP layer, its bank, and the head a second time; random weights draft badly, so
    this test does not say whether the drafts are right.
    """
    model = case("qwen3_5_moe")
    assert "mtp.layers.0.mlp.experts" in model.draft.block["expert_banks"]
    assert "mtp.fc" in model.draft.block["modules"]
    settings: dict[str, Any] = {"environment": {"PYTHONPATH": str(STAND_INS)}, "dtype": "bfloat16"}
    found = generate(model.folder, **settings, **options)
    assert_same(found, generate(model.decoded, **settings), ROUNDED, 16)
    assert_same(found[:2], [answer.first(4) for answer in model.expected[:2]], ROUNDED, 6)


def test_qwen35_moe_with_a_vision_tower(tmp_path: Path) -> None:
    """As such models are published: vLLM puts a model into a model and renames both; the tower stays plain."""
    from hf_models import VISION, VISION_AUTO, Family

    vision = {**VISION, "hidden_size": 64, "intermediate_size": 64, "out_hidden_size": 128}
    config = {"vision_config": vision, "tie_word_embeddings": False}
    draft = checkpoint(Family("qwen3_5_moe", config, QWEN35_MOE.config, VISION_AUTO), tmp_path / "source")
    assert "model.language_model.layers.0.linear_attn.in_proj_qkv" in draft.block["modules"]
    folder = draft.write(tmp_path / "espalier")
    convert_checkpoint(folder, tmp_path / "decoded", to="hf", dtype="bf16")
    settings: dict[str, Any] = {
        "environment": {"PYTHONPATH": str(STAND_INS)},
        "dtype": "bfloat16",
        "limit_mm_per_prompt": {"image": 0, "video": 0},
    }
    assert_same(generate(folder, **settings), generate(tmp_path / "decoded", **settings), ROUNDED, 16)


def test_a_converted_exl3_checkpoint(llama_exl3: Path, tmp_path: Path) -> None:
    """Made by exllamav3 of a trained model."""
    folder = tmp_path / "espalier"
    convert_checkpoint(llama_exl3, folder, to="espalier")
    assert_same(generate(folder), reference(folder, tmp_path / "decoded"), EXACT, 24)


def test_compiled(case: Callable[[str], Case], tmp_path: Path) -> None:
    """With torch.compile, which is vLLM's default; it needs a C++ compiler on the CPU."""
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs g++")
    model = case("llama")
    found = generate(model.folder, {"VLLM_CACHE_ROOT": str(tmp_path)}, enforce_eager=False)
    assert_same(found, model.expected, EXACT, 24)


def test_the_weights_decide(case: Callable[[str], Case], tmp_path: Path) -> None:
    """Another trellis gives other log-probabilities: the comparison above can fail."""
    model = case("llama")
    name = "model.layers.1.mlp.down_proj.esp_trellis"
    draft = Draft(model.draft.config, {s: dict(t) for s, t in model.draft.shards.items()}, model.draft.metadata)
    old = draft[name]
    draft[name] = Tensor.of(old.array()[..., ::-1].reshape(old.shape), old.dtype)
    found = generate(draft.write(tmp_path / "espalier"))
    with pytest.raises(AssertionError):
        assert_same(found, model.expected, EXACT, 0)
