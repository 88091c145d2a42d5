"""Models of transformers with compressed weights compute what the decoded models compute.

Decoded models are made by ``convert --to hf``, whose decoder (numpy) shares no code with the torch one used here. How
they compare: against the same weights in float32, which stands for the exact result, the error of the compressed model
is at most twice that of the decoded one in the same dtype (and a unit in the last place, for the case that one of them
has none). A mixture of experts may route a token otherwise where two experts are nearly equal. What follows is another
computation; positions from there on are not compared.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from builders import read_safetensors
from hf_models import FAMILIES, Exl3Maker, save_model
from runtime_models import LLAMA, QWEN2, QWEN3_MOE, QWEN35_MOE, BankRecipe, alike, espalier_model, routed

from espalier_format.checkpoint import open_checkpoint
from espalier_format.codec.rotation import padded
from espalier_format.converters.hf_architectures import ARCHITECTURES
from espalier_format.errors import MissingTensorError, ShapeError, UnexpectedTensorError, UnknownSizeError
from espalier_format.operations.convert import convert_checkpoint
from espalier_format.runtimes import transformers as runtime
from espalier_format.runtimes.transformers import replacement
from espalier_format.runtimes.transformers.banks import EXPERT_CLASSES
from espalier_format.runtimes.transformers.experts import QuantizedExperts
from espalier_format.runtimes.transformers.linear import JoinedLinear, QuantizedLinear

AUTO = transformers.AutoModelForCausalLM
VISION = transformers.AutoModelForImageTextToText
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RECIPES: dict[str, Any] = {
    "llama": (LLAMA, {}),
    "llama-tied": (LLAMA, {"quantized": r".*_proj"}),
    "qwen2-biases": (QWEN2, {"num_shards": 3}),
    "qwen3_moe": (QWEN3_MOE, {}),
    "qwen3_moe-down": (QWEN3_MOE, {"bank": BankRecipe(projections=["down_proj"])}),
    "qwen3_5_moe": (QWEN35_MOE, {"bank": BankRecipe(assignment="3-21")}),
    "qwen3_5_moe-gate": (QWEN35_MOE, {"bank": BankRecipe(projections=["gate_proj", "up_proj"], fused=True)}),
}


class Models:
    """Checkpoints by name, each made once: compressed, and decoded to a dtype."""

    def __init__(self, folder: Path, exl3: dict[str, Path]) -> None:
        self._folder = folder
        self._exl3 = exl3

    def compressed(self, name: str) -> Path:
        path = self._folder / name / "espalier"
        if not path.exists() and name in self._exl3:
            convert_checkpoint(self._exl3[name], path, to="espalier")
        elif not path.exists():
            family, options = RECIPES[name]
            draft = espalier_model(family, self._folder / name / "source", **options)
            if name == "llama-tied":
                assert draft.config is not None
                draft.config["tie_word_embeddings"] = True
                del draft["lm_head.weight"]
            draft.write(path)
        return path

    def decoded(self, name: str, dtype: str) -> Path:
        path = self._folder / name / dtype
        if not path.exists():
            convert_checkpoint(self.compressed(name), path, to="hf", dtype=dtype)
        return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, llama_exl3: Path, qmoe_exl3: Path) -> Models:
    return Models(tmp_path_factory.mktemp("models"), {"llama-exl3": llama_exl3, "qwen3_5_moe-exl3": qmoe_exl3})


EVERY_DTYPE = ("llama", "qwen2-biases", "qwen3_moe", "qwen3_5_moe")
CASES = [
    *((name, dtype) for name in EVERY_DTYPE for dtype in DTYPES),
    *((name, "fp32") for name in RECIPES if name not in EVERY_DTYPE),
    ("llama-exl3", "fp16"),
    ("qwen3_5_moe-exl3", "fp32"),
]


def tokens(model: Any, count: int = 16) -> torch.Tensor:
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(3, vocabulary, (2, count), generator=torch.Generator().manual_seed(1))


@pytest.mark.capability("transformers", "dense models, and mixtures of experts of mixed width")
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_logits(name: str, dtype: str, models: Models) -> None:
    found = runtime.load(models.compressed(name), dtype=DTYPES[dtype])
    decoded = AUTO.from_pretrained(models.decoded(name, dtype), dtype=DTYPES[dtype])
    exact = AUTO.from_pretrained(models.decoded(name, "fp32"), dtype=torch.float32, experts_implementation="eager")
    if dtype == "fp32":
        exact = exact.double()
    assert type(found) is type(decoded)
    assert found.dtype == DTYPES[dtype]
    ids = tokens(found)
    (logits, routes), (naive, naive_routes), (true, true_routes) = (routed(m, ids) for m in (found, decoded, exact))
    same = alike(true_routes, [routes, naive_routes])
    assert same >= 4
    logits, naive, true = logits[:, :same], naive[:, :same], true[:, :same]
    ulp = torch.finfo(DTYPES[dtype]).eps * true.abs().max()
    assert (logits - true).abs().max() <= 2 * (naive - true).abs().max() + ulp
    assert (logits - true).abs().max() < 0.1 * true.abs().max()


@pytest.mark.capability("transformers", "generate()")
@pytest.mark.parametrize("name", ["llama", "qwen2-biases", "qwen3_moe-down", "qwen3_5_moe"])
def test_generate(name: str, models: Models) -> None:
    """With a cache, which feeds tokens one by one after the first step."""
    found = runtime.load(models.compressed(name), dtype=torch.float32)
    decoded = AUTO.from_pretrained(models.decoded(name, "fp32"), dtype=torch.float32)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    ids = tokens(found, 5)
    mask = torch.ones_like(ids)
    made = found.generate(ids, attention_mask=mask, **options)
    assert made.shape == (2, 11)
    assert torch.equal(made, decoded.generate(ids, attention_mask=mask, **options))


FEW = ("phi3", "glm4", "gemma2", "olmoe", "qwen2_5_vl")
REFUSED = {"mixtral": UnexpectedTensorError, "gemma3": MissingTensorError}
"""Experts with other names of projections; and a projector that is no linear layer in the model."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in FAMILIES]
)
def test_families_as_they_come_from_exl3(name: str, tmp_path: Path) -> None:
    """Every projection quantized, with sizes that are no multiples of 128; some are stored in parts."""
    family = FAMILIES[name]
    made = Exl3Maker(*save_model(family, tmp_path / "source"), plain_vision=family.plain_vision)
    convert_checkpoint(made.draft.write(tmp_path / "exl3"), tmp_path / "espalier", to="espalier")
    auto = getattr(transformers, family.auto)
    if name in REFUSED:
        with pytest.raises(REFUSED[name]):
            runtime.load(tmp_path / "espalier", model_class=auto)
        return
    found = runtime.load(tmp_path / "espalier", model_class=auto, dtype=torch.float32)
    convert_checkpoint(tmp_path / "espalier", tmp_path / "hf", to="hf", dtype="fp32")
    decoded = auto.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    ids = tokens(found)
    with torch.no_grad():
        logits, expected = found(ids).logits, decoded(ids).logits
    assert (logits - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.capability("transformers", "the vision part of Qwen3.5")
def test_vision_and_its_joined_layers(models: Models) -> None:
    """EXL3 stores q, k and v of the vision tower apart, beside a plain copy of all three."""
    found = runtime.load(models.compressed("qwen3_5_moe-exl3"), model_class=VISION, dtype=torch.float32)
    decoded = VISION.from_pretrained(models.decoded("qwen3_5_moe-exl3", "fp32"), dtype=torch.float32)
    assert isinstance(found.model.visual.blocks[0].attn.qkv, JoinedLinear)
    vision = found.config.vision_config
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(16, values, generator=torch.Generator().manual_seed(0))
    grid = torch.tensor([[1, 4, 4]])
    with torch.no_grad():
        one, other = (model.model.visual(pixels, grid_thw=grid) for model in (found, decoded))
    for key in other.keys() if hasattr(other, "keys") else range(len(other)):
        if isinstance(other[key], torch.Tensor):
            torch.testing.assert_close(one[key], other[key], rtol=1e-5, atol=1e-5)
    copied = copy.deepcopy(found.model.visual.blocks[0].attn)
    assert copied.qkv._parts[0] is copied.q_proj


def quantized_bytes(folder: Path) -> int:
    with open_checkpoint(folder) as checkpoint:
        return sum(t.nbytes for name, t in checkpoint.tensors.items() if name.rpartition(".")[2].startswith("esp_"))


@pytest.mark.capability("transformers", "weights stay compressed")
@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2-biases"])
def test_memory_is_that_of_the_compressed_tensors(name: str, models: Models) -> None:
    """Every tensor of the model, but tables of angles, is one of the checkpoint and has its size."""
    folder = models.compressed(name)
    model = runtime.load(folder, dtype=torch.bfloat16)
    with open_checkpoint(folder) as checkpoint:
        stored = {name: (tensor.shape, tensor.nbytes) for name, tensor in checkpoint.tensors.items()}
    held = {
        n: (tuple(t.shape), t.nbytes) for n, t in model.state_dict().items() if n != "lm_head.weight" or n in stored
    }
    assert held == stored
    transient = [n for n, _ in model.named_buffers() if n not in model.state_dict()]
    assert all("inv_freq" in name for name in transient)


@pytest.mark.capability("transformers", "weights stay compressed")
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe", "qwen3_5_moe-exl3"])
def test_memory_of_experts(name: str, models: Models) -> None:
    """Besides the compressed tensors there are only alignment, 128 bytes, and two tables, 12 bytes, a matrix."""
    folder = models.compressed(name)
    model = runtime.load(folder, dtype=torch.bfloat16)
    experts = {place: module for place, module in model.named_modules() if isinstance(module, QuantizedExperts)}
    assert experts
    for place, module in experts.items():
        prefix = place.replace("model.", "model.language_model.") if "3_5" in name else place
        with open_checkpoint(folder) as checkpoint:
            stored = sum(t.nbytes for n, t in checkpoint.tensors.items() if n.startswith(f"{prefix}."))
        held = module.operand().nbytes  # the buffers, and the tables that the operand makes
        assert not list(module.parameters())
        assert stored < held <= stored + 140 * 3 * module.num_experts
    matrices = {(m.out_features, m.in_features) for m in model.modules() if isinstance(m, QuantizedLinear)}
    plain = {name for name, p in model.named_parameters() if tuple(p.shape) in matrices}
    assert all("gate" in name or "embed" in name for name in plain), plain


def test_the_experts_of_these_classes_compute_the_same() -> None:
    """Their code is compared, in the release of transformers that is installed; that they are one is all it shows."""
    import importlib

    families = ("olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe", "qwen3_5_moe")
    modules = [importlib.import_module(f"transformers.models.{name}.modeling_{name}") for name in families]
    classes = {n: getattr(module, n) for module in modules for n in EXPERT_CLASSES if hasattr(module, n)}
    assert classes.keys() == EXPERT_CLASSES
    codes = {inspect.getsource(inspect.unwrap(found.forward)) for found in classes.values()}
    assert len(codes) == 1


def test_plain_experts_may_be_stored_transposed(models: Models, tmp_path: Path) -> None:
    """The shapes tell the orientation. transformers alone does not read them that way round."""
    recipe = BankRecipe(projections=["gate_proj", "up_proj"], fused="transposed")
    draft = espalier_model(QWEN35_MOE, tmp_path / "source", bank=recipe)
    turned = runtime.load(draft.write(tmp_path / "turned"), dtype=torch.float32)
    model = runtime.load(models.compressed("qwen3_5_moe-gate"), dtype=torch.float32)
    ids = tokens(model)
    with torch.no_grad():
        assert torch.equal(turned(ids).logits, model(ids).logits)


def test_casting_and_copying_keep_the_compressed_weights(models: Models) -> None:
    model = runtime.load(models.compressed("qwen3_5_moe"), dtype=torch.float32)
    ids = tokens(model)
    with torch.no_grad():
        before = model(ids).logits
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert all(torch.equal(other(ids).logits, before) for other in copies)
    scales = {n: b.clone() for n, b in model.named_buffers() if b.dtype == torch.float16}
    assert any(name.endswith("experts.scales") for name in scales)
    assert any(name.endswith("lm_head.esp_suh") for name in scales)
    model.to(torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    after = dict(model.named_buffers())
    assert all(torch.equal(after[name], value) and after[name].dtype == torch.float16 for name, value in scales.items())
    with torch.no_grad():
        assert model(ids).logits.dtype == torch.bfloat16
        model.to(torch.float32)
        assert model(ids).logits.dtype == torch.float32


def test_state_dict_gives_the_model_back(models: Models) -> None:
    """It is complete, experts included, under names of its own for these."""
    folder = models.compressed("qwen3_5_moe")
    model, other = (runtime.load(folder, dtype=torch.float32) for _ in range(2))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for tensor in [*other.parameters(), *(b for n, b in other.named_buffers() if n in state)]:
        tensor.data.zero_()
    other.load_state_dict(state)
    ids = tokens(model)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, other(ids).logits)


def test_nothing_is_trainable(models: Models) -> None:
    model = runtime.load(models.compressed("llama"))
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.hf_quantizer.is_trainable
    assert not model.training
    assert not model(tokens(model)).logits.requires_grad


def test_the_head_stays_tied_where_it_is_plain(models: Models) -> None:
    model = runtime.load(models.compressed("llama-tied"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    stored, _ = read_safetensors(models.compressed("llama-tied") / "model.safetensors")
    assert model.lm_head.weight.detach().view(torch.int16).numpy().tobytes() == stored["model.embed_tokens.weight"].data


def test_a_printed_model_says_what_its_layers_are(models: Models) -> None:
    text = repr(runtime.load(models.compressed("qwen3_5_moe")))
    assert "QuantizedExperts(num_experts=4, hidden=64, intermediate=48, codebooks=" in text
    assert "codebook=int8@6, rotation=" in text


def test_padded_sizes_become_those_of_the_model(models: Models, tmp_path: Path) -> None:
    """EXL3 may leave true sizes unknown; a model's own config states them. The rest of each matrix is cut off."""
    draft = espalier_model(LLAMA, tmp_path / "source")
    for spec in draft.block["modules"].values():
        for side, block in (("in_features", "in"), ("out_features", "out")):
            spec[side] = padded(spec[side], spec["rotation"][block])
        spec["size_source"] = "padded"
    found = runtime.load(draft.write(tmp_path / "padded"), dtype=torch.float32)
    exact = runtime.load(models.compressed("llama"), dtype=torch.float32)
    assert found.lm_head.out_features == 70
    ids = tokens(exact)
    with torch.no_grad():
        assert torch.equal(found(ids).logits, exact(ids).logits)


def test_parts_that_do_not_make_up_a_layer(models: Models) -> None:
    """A part is missing, or has an unknown size; or the model has fewer outputs than the parts together."""
    folder = models.compressed("qwen3_5_moe-exl3")
    name = "model.visual.blocks.0.attn.k_proj"
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.quantization is not None
        modules = dict(checkpoint.quantization.modules)
    attention = torch.nn.Module()
    attention.qkv = torch.nn.Linear(128, 384, device="meta")
    model = torch.nn.ModuleDict({"attn": attention})
    join = next(join for join in ARCHITECTURES["qwen3_5_moe"].joins if join.fused == "qkv")
    arguments = (model, "attn.qkv", "model.visual.blocks.0.attn", join)
    assert replacement._joined(*arguments, modules).out_features == 384
    for changed in ({}, {name: modules[name].model_copy(update={"size_source": "padded"})}):
        others = {other: spec for other, spec in modules.items() if other != name}
        with pytest.raises(UnknownSizeError, match=r"k_proj: it is one part of qkv"):
            replacement._joined(*arguments, {**others, **changed})
    attention.qkv = torch.nn.Linear(128, 256, device="meta")
    with pytest.raises(ShapeError, match="do not make up the layer"):
        replacement._joined(*arguments, modules)
