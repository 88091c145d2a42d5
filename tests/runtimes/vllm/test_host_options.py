"""Which options of vLLM turn checks off, and which are refused; without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from builders import Bank, Module, espalier_draft

from espalier_format.errors import UsageError
from espalier_format.schema.config import parse_quantization_config

vllm = pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` makes an environment that has it")

BANK = "model.layers.0.mlp.experts"
SIZES = {"gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96)}
READ = {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "runai_streamer"}


def _vllm_is(
    monkeypatch: pytest.MonkeyPatch,
    *,
    load_format: str = "auto",
    eager: bool = False,
    cuda: bool = True,
    extra: dict[str, Any] | None = None,
) -> None:
    from espalier_format.runtimes.vllm import host_options

    config = SimpleNamespace(
        load_config=SimpleNamespace(
            load_format=load_format, download_dir="/models", model_loader_extra_config=extra or {}
        ),
        model_config=SimpleNamespace(enforce_eager=eager),
    )
    monkeypatch.setattr(host_options, "get_current_vllm_config_or_none", lambda: config)
    monkeypatch.setattr(host_options, "current_platform", SimpleNamespace(is_cuda=lambda: cuda))


def test_every_load_format_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked, dummy, or refused by name; a format that vLLM adds is refused."""
    from typing import get_args

    from vllm.model_executor.model_loader import LoadFormats

    from espalier_format.runtimes.vllm.host_options import loads_from_checkpoint

    known = set(get_args(LoadFormats))
    assert known >= READ | {"dummy", "pt", "npcache", "tensorizer", "sharded_state"}
    for load_format in known | {"telepathy"}:
        _vllm_is(monkeypatch, load_format=load_format)
        if load_format in READ | {"dummy"}:
            assert loads_from_checkpoint() is (load_format != "dummy")
        else:
            with pytest.raises(UsageError, match=f"--load-format {load_format} "):
                loads_from_checkpoint()


def test_checks_are_on_when_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from espalier_format.runtimes.vllm import host_options

    monkeypatch.setattr(host_options, "get_current_vllm_config_or_none", lambda: None)
    assert host_options.loads_from_checkpoint()
    assert host_options.download_folder() is None


def test_tracking_is_on_unless_it_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own default for a quantized model is None, and off."""
    from espalier_format.runtimes.vllm import host_options

    options: list[dict[str, Any]] = [{}, {"enable_weights_track": True}, {"enable_weights_track": None}]
    for extra in options:
        _vllm_is(monkeypatch, extra=extra)
        assert host_options.tracks_weights()
    _vllm_is(monkeypatch, extra={"enable_weights_track": False})
    assert not host_options.tracks_weights()
    monkeypatch.setattr(host_options, "get_current_vllm_config_or_none", lambda: None)
    assert host_options.tracks_weights()


def test_dummy_banks_are_not_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM fills parameters with dummies, but not the packed bank."""
    import torch

    from espalier_format.runtimes.tensor_parallel import FeatureRange
    from espalier_format.runtimes.vllm.bank_tensors import BankTensors, rank_projections

    draft = espalier_draft([], [Bank(BANK, SIZES, ("e2m1@1", "int5@3"), "01", (32, 32))])
    bank = parse_quantization_config(draft.block).expert_banks[BANK]
    projections = rank_projections(bank, 96, 64, FeatureRange(0, 64), (0, 1))
    _vllm_is(monkeypatch, load_format="dummy")
    operand = BankTensors(BANK, projections, (0, 1), torch.bfloat16).operand()
    assert not bool(operand.scales.any())


def test_a_format_past_the_loaders_is_refused_at_the_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from espalier_format.runtimes.vllm.config import EspalierConfig

    config = EspalierConfig.from_config(espalier_draft().block)
    _vllm_is(monkeypatch, load_format="sharded_state")
    with pytest.raises(UsageError, match="--load-format sharded_state"):
        config.get_quant_method(torch.nn.Module(), "model")


def _make(kind: str, dtype: Any) -> None:
    """Create the weights of a layer: "linear", "head", "bank", or "plain experts" for a bank with one."""
    import torch

    from espalier_format.runtimes.vllm.config import EspalierConfig
    from espalier_format.runtimes.vllm.expert_method import EspalierExpertMethod
    from espalier_format.runtimes.vllm.folder_check import FolderCheck
    from espalier_format.runtimes.vllm.head_method import EspalierHeadMethod
    from espalier_format.runtimes.vllm.linear_method import EspalierLinearMethod

    books, assignment = (("e2m1@1",), "0-") if kind == "plain experts" else (("e2m1@1", "int5@3"), "01")
    bank = Bank(BANK, SIZES, books, assignment, (32, 32))
    config = EspalierConfig.from_config(
        espalier_draft([Module("model.up", 96, 64, "int6@4", (32, 32))], [bank]).block
    ).quantization
    spec, folder = config.modules["model.up"], FolderCheck(config)
    layer: Any = torch.nn.Module()
    layer.tp_rank, layer.tp_size = 0, 1
    if kind == "linear":
        EspalierLinearMethod({"model.up": spec}, folder).create_weights(layer, 96, [64], 96, 64, dtype)
    elif kind == "head":
        layer.org_vocab_size = 64
        layer.shard_indices = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=64)
        EspalierHeadMethod("model.up", spec, folder).create_weights(layer, 96, [64], 96, 64, dtype)
    else:
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation

        layer.activation, layer.apply_router_weight_on_input, layer.expert_map = MoEActivation.SILU, False, None
        method = EspalierExpertMethod.__new__(EspalierExpertMethod)
        method.moe = SimpleNamespace(
            num_experts=2, intermediate_size=64, tp_rank=0, tp_size=1, has_bias=False, is_lora_enabled=False,
            moe_parallel_config=SimpleNamespace(use_all2all_kernels=False),
        )  # fmt: skip
        method._name, method._bank, method._folder = BANK, config.expert_banks[BANK], folder
        method.create_weights(layer, 2, 96, 64, dtype)
    assert layer.espalier is not None


@pytest.mark.parametrize(
    ("kind", "dtype", "message"),
    [
        ("linear", "float32", r"^model\.up: CUDA graphs cannot capture float32 activations.*--enforce-eager"),
        ("head", "float32", r"^model\.up: CUDA graphs cannot capture float32 activations.*--enforce-eager"),
        ("bank", "float32", r"^model\.layers\.0\.mlp\.experts: CUDA graphs .* float32 activations.*--enforce-eager"),
        ("plain experts", "bfloat16", r"experts: CUDA graphs cannot capture plain experts in a bank.*--enforce-eager"),
        ("linear", "bfloat16", None),
        ("head", "float16", None),
        ("bank", "bfloat16", None),
    ],
)
def test_what_graphs_cannot_capture(
    monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str, message: str | None
) -> None:
    """Refused before a weight is read, on CUDA without --enforce-eager only."""
    import torch

    for eager, cuda in ((True, True), (False, False), (True, False)):
        _vllm_is(monkeypatch, eager=eager, cuda=cuda)
        _make(kind, getattr(torch, dtype))
    _vllm_is(monkeypatch)
    if message is None:
        _make(kind, getattr(torch, dtype))
    else:
        with pytest.raises(UsageError, match=message):
            _make(kind, getattr(torch, dtype))
