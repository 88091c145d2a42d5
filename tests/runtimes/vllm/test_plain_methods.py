"""What is checked of plain experts, without an engine: vLLM's own parameters, filled expert by expert."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from espalier_format.errors import MissingTensorError

vllm = pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` makes an environment that has it")

NAME = "model.layers.0.mlp.experts"
HIDDEN, INTERMEDIATE = 5, 3
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(autouse=True)
def _vllm_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM makes of the weights after the check needs a whole model."""
    from espalier_format.runtimes.vllm import plain_methods

    monkeypatch.setattr(plain_methods.UnquantizedFusedMoEMethod, "process_weights_after_loading", lambda *_: None)


def _made(*, padding: int = 0, gated: bool = True, expert_map: list[int] | None = None) -> tuple[Any, Any]:
    """Return the method, and a layer with three experts of the rank; ``padding`` is what vLLM rounds sizes up by."""
    import torch

    from espalier_format.runtimes.vllm.plain_methods import PlainExpertMethod

    layer: Any = torch.nn.Module()
    layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name = PROJECTIONS
    layer.expert_map = None if expert_map is None else torch.tensor(expert_map, dtype=torch.int32)
    method = PlainExpertMethod.__new__(PlainExpertMethod)
    method.moe = SimpleNamespace(
        intermediate_size_per_partition_unpadded=INTERMEDIATE, hidden_dim_unpadded=HIDDEN, is_act_and_mul=gated,
        has_bias=False,
    )  # fmt: skip
    method._name = NAME
    method.create_weights(layer, 3, HIDDEN + padding, INTERMEDIATE + padding, torch.bfloat16)
    return method, layer


def _load(layer: Any, but: tuple[int, str] | None = None, *, gated: bool = True) -> None:
    """Fill what a checkpoint has, and leave what vLLM has added as it is."""
    first, second = layer.w13_weight.data, layer.w2_weight.data
    half = first.shape[1] // 2 if gated else 0
    for place in range(len(first)):
        targets = {
            "gate_proj": first[place, :INTERMEDIATE, :HIDDEN],
            "up_proj": first[place, half : half + INTERMEDIATE, :HIDDEN],
            "down_proj": second[place, :HIDDEN, :INTERMEDIATE],
        }
        for projection, target in targets.items():
            if (place, projection) != but and (gated or projection != "up_proj"):
                target.fill_(1)


@pytest.mark.parametrize("padding", [0, 4])
def test_experts_that_were_loaded(padding: int) -> None:
    """The check itself leaves nothing behind, and does not look again at what vLLM has made of the weights."""
    method, layer = _made(padding=padding)
    _load(layer)
    method.process_weights_after_loading(layer)
    layer.w13_weight.data.fill_(float("nan"))
    method.process_weights_after_loading(layer)


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("place", [0, 2])
def test_an_expert_that_was_not_loaded_is_named(padding: int, projection: str, place: int) -> None:
    method, layer = _made(padding=padding)
    _load(layer, (place, projection))
    with pytest.raises(MissingTensorError, match=rf"^{NAME}\.{place}\.{projection}\.weight: vLLM has not found"):
        method.process_weights_after_loading(layer)


def test_experts_of_another_rank_have_other_numbers() -> None:
    method, layer = _made(expert_map=[-1, 2, 0, -1, 1])
    _load(layer, (1, "up_proj"))
    with pytest.raises(MissingTensorError, match=rf"^{NAME}\.4\.up_proj\.weight"):
        method.process_weights_after_loading(layer)


def test_experts_without_a_gate() -> None:
    """vLLM calls the only projection gate, and there is no second half."""
    method, layer = _made(gated=False)
    layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name = "up_proj", None
    _load(layer, gated=False)
    method.process_weights_after_loading(layer)
    method, layer = _made(gated=False)
    layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name = "up_proj", None
    _load(layer, (1, "gate_proj"), gated=False)
    with pytest.raises(MissingTensorError, match=rf"^{NAME}\.1\.up_proj\.weight"):
        method.process_weights_after_loading(layer)


def test_dummy_weights_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    from espalier_format.runtimes.vllm import plain_methods

    monkeypatch.setattr(plain_methods, "loads_from_checkpoint", lambda: False)
    method, layer = _made()
    layer.w13_weight.data.fill_(float("nan"))
    method.process_weights_after_loading(layer)
