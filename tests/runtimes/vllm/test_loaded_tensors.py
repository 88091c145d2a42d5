"""What the plugin makes of the tensors that vLLM hands to it, without an engine: slices, and what is missing.

vLLM itself lets a quantized tensor go missing without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from builders import Bank, Draft, Module, espalier_draft

from espalier_format.errors import (
    DtypeError,
    MissingTensorError,
    NonFiniteScaleError,
    ScaleOverflowError,
    ShapeError,
    UnexpectedTensorError,
)
from espalier_format.runtimes.tensor_parallel import FeatureRange
from espalier_format.schema.config import parse_quantization_config

vllm = pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` makes an environment that has it")

BANK = "model.layers.0.mlp.experts"
MODULES = (
    Module("q_proj", 96, 64, "int6@4", (32, 32)),
    Module("k_proj", 96, 64, "exl3-mul1@2.5", (0, 32)),
)
KINDS = ("esp_trellis", "esp_suh", "esp_svh")


def _torch(draft: Draft, name: str) -> Any:
    import torch

    stored = draft[name]
    values = torch.from_numpy(stored.array().reshape(stored.shape).copy())
    return values.view(torch.bfloat16) if stored.dtype == "BF16" else values


@pytest.fixture
def layer() -> tuple[Any, Any, Draft]:
    """A merged layer on the second of two ranks: two quantized parts, and a plain one."""
    import torch

    from espalier_format.runtimes.vllm.layer_parts import LayerShape, layer_parts
    from espalier_format.runtimes.vllm.layer_tensors import LayerTensors

    draft = espalier_draft(MODULES, [])
    specs = parse_quantization_config(draft.block).modules
    shape = LayerShape(96, 96, (32, 32, 16), 1, 2)
    tensors = LayerTensors(layer_parts({**specs, "v_proj": None}, shape), shape)
    made = torch.nn.Module()
    tensors.register(made, torch.float32)
    return tensors, made, draft


def _calls(draft: Draft, layer: Any, plain: Any) -> Iterator[tuple[str, Any]]:
    """The calls that vLLM makes, by the name of the tensor."""
    for name, shard in (("q_proj", "q"), ("k_proj", "k")):
        for kind in KINDS:
            parameter, tensor = getattr(layer, kind), _torch(draft, f"{name}.{kind}")
            yield f"{name}.{kind}", lambda p=parameter, t=tensor, s=shard: p.weight_loader(p, t, s)
    yield "v_proj.weight", lambda: layer.weight.weight_loader(layer.weight, plain, "v")


def test_a_rank_holds_its_slice(layer: tuple[Any, Any, Draft]) -> None:
    import torch

    from espalier_format.kernels.linear import linear

    tensors, made, draft = layer
    plain = torch.arange(32 * 96, dtype=torch.bfloat16).view(32, 96)
    for _, call in _calls(draft, made, plain):
        call()
    tensors.check_loaded(made)
    query, key, value = tensors.operands(made)
    assert torch.equal(value, plain[16:].float())
    specs = parse_quantization_config(draft.block).modules
    for operand, name in ((query, "q_proj"), (key, "k_proj")):
        assert torch.equal(operand.trellis, _torch(draft, f"{name}.esp_trellis")[:, 2:])
        assert torch.equal(operand.suh, _torch(draft, f"{name}.esp_suh"))
        assert torch.equal(operand.svh, _torch(draft, f"{name}.esp_svh")[32:])
        assert operand.codebook.name == specs[name].codebook
        assert (operand.trellis.data_ptr() - made.esp_trellis.data_ptr()) % 128 == 0
        assert linear(torch.ones(2, 96), operand).shape == (2, 32)


@pytest.mark.parametrize("missing", [f"{m.name}.{kind}" for m in MODULES for kind in KINDS] + ["v_proj.weight"])
def test_what_was_not_loaded_is_named(layer: tuple[Any, Any, Draft], missing: str) -> None:
    import torch

    tensors, made, draft = layer
    for name, call in _calls(draft, made, torch.zeros(32, 96)):
        if name != missing:
            call()
    with pytest.raises(MissingTensorError, match=missing):
        tensors.check_loaded(made)


def test_what_does_not_fit_is_named(layer: tuple[Any, Any, Draft]) -> None:
    import torch

    _, made, draft = layer
    trellis = _torch(draft, "q_proj.esp_trellis")
    load = made.esp_trellis.weight_loader
    with pytest.raises(DtypeError, match=r"q_proj\.esp_trellis"):
        load(made.esp_trellis, trellis.float(), "q")
    with pytest.raises(ShapeError, match=r"q_proj\.esp_trellis"):
        load(made.esp_trellis, trellis[:, :2], "q")
    with pytest.raises(ShapeError, match=r"v_proj\.esp_trellis"):
        load(made.esp_trellis, trellis, "v")
    with pytest.raises(ShapeError, match=r"v_proj\.weight"):
        made.weight.weight_loader(made.weight, torch.zeros(32, 64), "v")


NO_COPY = "is no copy of the weight that is stored quantized"


def test_a_plain_copy_of_a_quantized_weight_is_dropped(layer: tuple[Any, Any, Draft]) -> None:
    """It has the true size of the whole module, and fills no other part's place either."""
    import torch

    tensors, made, draft = layer
    plain = torch.ones(32, 96)
    for _, call in _calls(draft, made, plain):
        call()
    before = {name: parameter.nan_to_num() for name, parameter in made.named_parameters()}  # between parts lie NaN
    made.weight.weight_loader(made.weight, torch.full((64, 96), 3.0), "q")
    made.weight.weight_loader(made.weight, torch.full((64, 96), 3.0, dtype=torch.bfloat16), "k")
    assert all(torch.equal(parameter.nan_to_num(), before[name]) for name, parameter in made.named_parameters())
    tensors.check_loaded(made)
    for shape in ((32, 96), (64, 48), (96, 64), (64 * 96,)):
        with pytest.raises(UnexpectedTensorError, match=rf"k_proj\.weight: {NO_COPY}"):
            made.weight.weight_loader(made.weight, torch.zeros(shape), "k")


def test_the_place_for_copies_does_not_stay() -> None:
    """A layer without a plain part has no weight once it is loaded, and a copy alone does not load it."""
    import torch

    from espalier_format.runtimes.vllm.layer_parts import LayerShape, layer_parts
    from espalier_format.runtimes.vllm.layer_tensors import LayerTensors

    draft = espalier_draft(MODULES[:1], [])
    shape = LayerShape(96, 96, (64,), 0, 1)
    tensors = LayerTensors(layer_parts(parse_quantization_config(draft.block).modules, shape), shape)
    made = torch.nn.Module()
    tensors.register(made, torch.float32)
    made.weight.weight_loader(made.weight, torch.ones(64, 96))
    with pytest.raises(MissingTensorError, match=r"q_proj\.esp_trellis"):
        tensors.check_loaded(made)
    assert sorted(name for name, _ in made.named_parameters()) == sorted(KINDS)
    for kind in KINDS:
        parameter = getattr(made, kind)
        parameter.weight_loader(parameter, _torch(draft, f"q_proj.{kind}"))
    tensors.check_loaded(made)


def _misshapen(tensor: Any) -> Iterator[Any]:
    """Larger and smaller along each dimension; the larger ones begin with the tensor itself."""
    import torch

    for dimension, size in enumerate(tensor.shape):
        for other in (2 * size, size + 1, size - 1, size // 2):
            yield torch.cat([tensor, tensor], dimension).narrow(dimension, 0, other).contiguous()
    yield tensor[None]


@pytest.mark.parametrize("world", [1, 2])
def test_the_whole_tensor_must_have_the_stated_shape(world: int) -> None:
    """What a rank cuts out of a larger tensor looks right: without this, it would be decoded, wrongly."""
    import torch

    from espalier_format.runtimes.vllm.layer_parts import LayerShape, layer_parts
    from espalier_format.runtimes.vllm.layer_tensors import LayerTensors

    draft = espalier_draft(MODULES[:1], [])
    for rank in range(world):
        for shape in (LayerShape(96, 96, (64 // world,), rank, world), LayerShape(96, 96, (64,), 0, 1)):
            tensors = LayerTensors(layer_parts(parse_quantization_config(draft.block).modules, shape), shape)
            made = torch.nn.Module()
            tensors.register(made, torch.float32)
            for kind in KINDS:
                parameter, right = getattr(made, kind), _torch(draft, f"q_proj.{kind}")
                for wrong in _misshapen(right):
                    with pytest.raises(ShapeError, match=rf"q_proj\.{kind}: the tensor has another shape"):
                        parameter.weight_loader(parameter, wrong)
                with pytest.raises(MissingTensorError):
                    tensors.check_loaded(made)
                parameter.weight_loader(parameter, right)
            tensors.check_loaded(made)


def test_a_head_of_another_shape() -> None:
    """Of 64 logits the rank has the first 32."""
    from types import SimpleNamespace

    import torch

    from espalier_format.runtimes.vllm.folder_check import FolderCheck
    from espalier_format.runtimes.vllm.head_method import EspalierHeadMethod

    draft = espalier_draft(MODULES[:1], [])
    config = parse_quantization_config(draft.block)
    layer = torch.nn.Module()
    layer.shard_indices = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=32)
    layer.org_vocab_size, layer.tp_rank, layer.tp_size = 64, 0, 2
    EspalierHeadMethod("q_proj", config.modules["q_proj"], FolderCheck(config)).create_weights(
        layer, 96, [32], 96, 64, torch.float32
    )
    right = _torch(draft, "q_proj.esp_svh")
    for wrong in _misshapen(right):
        with pytest.raises(ShapeError, match=r"q_proj\.esp_svh: the tensor has another shape"):
            layer.esp_svh.weight_loader(layer.esp_svh, wrong)
    layer.esp_svh.weight_loader(layer.esp_svh, right)


def test_a_scale_that_is_not_finite(layer: tuple[Any, Any, Draft]) -> None:
    import torch

    tensors, made, draft = layer
    for _, call in _calls(draft, made, torch.zeros(32, 96)):
        call()
    tensors.operands(made)[1].svh[5] = torch.inf
    with pytest.raises(NonFiniteScaleError, match=r"k_proj\.esp_svh"):
        tensors.check_loaded(made)


def test_a_weight_that_overflows(layer: tuple[Any, Any, Draft]) -> None:
    """In the dtype of the layer: operators on a GPU do not look at values."""
    import torch

    tensors, made, draft = layer
    for _, call in _calls(draft, made, torch.zeros(32, 96)):
        call()
    operand = tensors.operands(made)[1]
    operand.suh[:], operand.svh[:] = 600, 600
    tensors.check_loaded(made)
    tensors._dtype = torch.float16
    with pytest.raises(ScaleOverflowError, match="k_proj"):
        tensors.check_loaded(made)


@pytest.fixture
def bank() -> tuple[Any, Any, Draft]:
    """Experts 2 and 0 of three, on the second of two ranks; expert 0's projections are plain."""
    import torch

    from espalier_format.runtimes.vllm.bank_tensors import BankTensors, rank_projections

    sizes = {"gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96)}
    draft = espalier_draft([], [Bank(BANK, sizes, ("e2m1@1", "int5@3"), "-01", (32, 32))])
    stated = parse_quantization_config(draft.block).expert_banks[BANK]
    projections = rank_projections(stated, 96, 64, FeatureRange(32, 64), (2, 0))
    tensors = BankTensors(BANK, projections, (2, 0), torch.float32)
    made = torch.nn.Module()
    tensors.register(made)
    return tensors, made, draft


def _load_bank(made: Any, draft: Draft, but: str = "") -> dict[str, bool | None]:
    """What vLLM does for all tensors, and whether the rank took each."""
    taken = {}
    shards = {"gate_proj": ("w13", "w1"), "up_proj": ("w13", "w3"), "down_proj": ("w2", "w2")}
    for name in draft.names():
        if name.startswith(BANK) and name != but:
            expert, projection, kind = name.removeprefix(f"{BANK}.").split(".")
            group, shard = shards[projection]
            parameter = getattr(made, f"{group}_{kind}")
            taken[name] = parameter.weight_loader(
                param=parameter,
                loaded_weight=_torch(draft, name),
                weight_name=f"experts.{group}_{kind}",
                shard_id=shard,
                expert_id=int(expert),
                return_success=True,
            )
    return taken


def test_a_rank_holds_its_experts(bank: tuple[Any, Any, Draft]) -> None:
    import torch

    tensors, made, draft = bank
    taken = _load_bank(made, draft)
    assert {name.removeprefix(f"{BANK}.")[0] for name, took in taken.items() if took} == {"0", "2"}
    operand = tensors.operand()
    buffers = {"trellis": operand.trellis, "scales": operand.scales}
    trellis, suh, svh = operand.layout.views(buffers, "down_proj", 0)
    assert torch.equal(trellis, _torch(draft, f"{BANK}.2.down_proj.esp_trellis")[2:])
    assert torch.equal(suh, _torch(draft, f"{BANK}.2.down_proj.esp_suh")[32:])
    assert torch.equal(svh, _torch(draft, f"{BANK}.2.down_proj.esp_svh"))
    trellis, suh, svh = operand.layout.views(buffers, "up_proj", 0)
    assert torch.equal(trellis, _torch(draft, f"{BANK}.2.up_proj.esp_trellis")[:, 2:])
    assert torch.equal(suh, _torch(draft, f"{BANK}.2.up_proj.esp_suh"))
    assert torch.equal(svh, _torch(draft, f"{BANK}.2.up_proj.esp_svh")[32:])
    assert torch.equal(operand.plain["down_proj", 1], _torch(draft, f"{BANK}.0.down_proj.weight")[:, 32:].float())
    assert torch.equal(operand.plain["gate_proj", 1], _torch(draft, f"{BANK}.0.gate_proj.weight")[32:].float())


@pytest.mark.parametrize("missing", ["0.up_proj.weight", "2.gate_proj.esp_trellis", "2.down_proj.esp_suh"])
def test_an_expert_that_was_not_loaded_is_named(bank: tuple[Any, Any, Draft], missing: str) -> None:
    tensors, made, draft = bank
    _load_bank(made, draft, but=f"{BANK}.{missing}")
    with pytest.raises(MissingTensorError, match=missing):
        tensors.operand()


def test_a_plain_copy_of_an_expert_is_dropped(bank: tuple[Any, Any, Draft]) -> None:
    """Of expert 2, which is quantized; expert 0 is plain, and 1 on another rank."""
    import torch

    tensors, made, draft = bank
    _load_bank(made, draft)
    before = tensors.operand()
    for group, shard, shape in (("w13", "w1", (64, 96)), ("w13", "w3", (64, 96)), ("w2", "w2", (96, 64))):
        parameter = getattr(made, f"{group}_weight")
        assert parameter.weight_loader(parameter, torch.full(shape, 3.0), "", shard, 2, return_success=True)
        assert not parameter.weight_loader(parameter, torch.full(shape, 3.0), "", shard, 1, return_success=True)
        with pytest.raises(UnexpectedTensorError, match=rf"experts\.2\.\w+\.weight: {NO_COPY}"):
            parameter.weight_loader(parameter, torch.full(shape[::-1], 3.0), "", shard, 2)
    after = tensors.operand()
    assert torch.equal(after.trellis, before.trellis)
    assert torch.equal(after.scales, before.scales)
    assert not any(bool((weight == 3).all()) for weight in after.plain.values())


def test_a_trellis_of_a_plain_expert(bank: tuple[Any, Any, Draft]) -> None:
    _, made, draft = bank
    trellis = _torch(draft, f"{BANK}.2.gate_proj.esp_trellis")
    with pytest.raises(ShapeError, match=r"experts\.0\.gate_proj\.esp_trellis: .* stored plain"):
        made.w13_esp_trellis.weight_loader(made.w13_esp_trellis, trellis, "", "w1", 0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_of_another_shape(bank: tuple[Any, Any, Draft], kind: str) -> None:
    """Expert 2, of which the rank holds half."""
    _, made, draft = bank
    for group, shard, projection in (("w13", "w1", "gate_proj"), ("w2", "w2", "down_proj")):
        parameter = getattr(made, f"{group}_{kind}")
        for wrong in _misshapen(_torch(draft, f"{BANK}.2.{projection}.{kind}")):
            with pytest.raises(ShapeError, match=rf"experts\.2\.{projection}\.{kind}: the tensor has another shape"):
                parameter.weight_loader(parameter, wrong, "", shard, 2)


def test_an_expert_that_was_not_loaded_is_not_zero(bank: tuple[Any, Any, Draft]) -> None:
    """Were it not named, its output would be NaN: scales of zero would make it vanish without a word."""
    tensors, made, draft = bank
    _load_bank(made, draft, but=f"{BANK}.2.down_proj.esp_svh")
    _, suh, svh = tensors._layout.views(tensors._buffers, "down_proj", 0)
    assert bool(svh.isnan().all())
    assert bool(suh.isfinite().all())


def test_scales_of_an_expert_that_are_refused(bank: tuple[Any, Any, Draft]) -> None:
    import torch

    tensors, made, draft = bank
    _load_bank(made, draft)
    _, suh, svh = tensors._layout.views(tensors._buffers, "down_proj", 0)
    suh[:], svh[:] = 600, 600
    tensors.operand()
    tensors._dtype = torch.float16
    with pytest.raises(ScaleOverflowError, match=f"down_proj of expert 0 of {BANK}"):
        tensors.operand()
    svh[3] = torch.nan
    with pytest.raises(NonFiniteScaleError, match=BANK):
        tensors.operand()


def test_no_expert_is_not_the_last_one() -> None:
    """-1 means no expert; used as an index, it is the last."""
    import torch

    from espalier_format.runtimes.vllm.expert_method import rank_ids

    places = torch.tensor([-1, 0, -1, 1], dtype=torch.int32)
    for dtype in (torch.int32, torch.int64):
        ids = torch.tensor([[3, -1], [0, 1], [2, -1]], dtype=dtype)
        assert rank_ids(ids, places).tolist() == [[1, -1], [-1, 0], [-1, -1]]
        assert rank_ids(ids, places).dtype in (torch.int32, torch.int64)


def test_registering_twice() -> None:
    """vLLM calls it in every process, and a user may too; the class can be found by name in a subprocess."""
    import pickle

    from vllm.model_executor.layers.quantization import get_quantization_config

    from espalier_format.runtimes.vllm import register

    register()
    register()
    config = get_quantization_config("espalier")
    assert config.__module__ == "espalier_format.runtimes.vllm.config"
    block = espalier_draft(MODULES, []).block
    made = pickle.loads(pickle.dumps(config.from_config(block)))
    assert made.quantization == parse_quantization_config(block)
