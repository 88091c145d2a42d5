"""The project's own decoders go through the kit, as those of any runtime do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from espalier_format.conformance import ConformanceReport, Options, run_conformance
from espalier_format.conformance.loading import load_decoders

ADAPTERS = "espalier_format.conformance.adapters"
ALL_READERS = Options(readers=("espalier", "exl3", "plain"))


def messages(report: ConformanceReport) -> list[str]:
    return [f"{result.case}: {result.mismatch.message}" for result in report.failures if result.mismatch]


def decoders(name: str) -> Mapping[Any, Any]:
    return load_decoders([f"{ADAPTERS}.{name}"])[0]


@pytest.mark.capability("numpy decoder", "conformance level 3")
def test_numpy_conforms_at_level_3_and_rounds_correctly() -> None:
    report = run_conformance(
        decoders("numpy_adapter"), options=Options(exact=True, readers=ALL_READERS.readers), claim=3
    )
    assert messages(report) == []
    assert (report.exit_code, report.shown, report.skipped) == (0, 3, 0)
    # So that a kit that lost its cases does not pass unseen.
    assert {kind.kind: kind.passed for kind in report.kinds} == {
        "open": 146,
        "verify": 168,
        "codes": 41,
        "weights": 588,
        "load": 225,
        "matmul": 284,
        "experts": 36,
    }


@pytest.mark.capability("torch decoder", "conformance level 3")
def test_torch_and_the_linear_layer_conform_on_the_cpu() -> None:
    pytest.importorskip("torch")
    chosen = {kind: decoder for kind, decoder in decoders("torch_adapter").items() if kind not in ("open", "verify")}
    report = run_conformance(chosen, device="cpu")
    assert messages(report) == []
    assert {report.verdict(level) for level in (2, 3)} == {"passed"}


def operators() -> dict[Any, Any]:
    """The registered torch operators, which choose the implementation by the device."""
    pytest.importorskip("torch")
    pytest.importorskip("espalier_format.kernels.ops")
    return dict(decoders("operators_adapter"))


def test_operators_conform_on_the_cpu() -> None:
    chosen = operators()
    assert set(chosen) == {"codes", "weights", "load", "matmul", "experts"}
    report = run_conformance(chosen, device="cpu")
    assert messages(report) == []
    assert {report.verdict(level) for level in (2, 3)} == {"passed"}
    assert [kind.kind for kind in report.kinds if kind.refuses_at_load] == ["weights"]


def test_the_adapter_of_the_operators_gives_what_the_operator_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at no values: what the kit judges is the operator, and where that does not refuse, `load`."""
    chosen = operators()
    torch = pytest.importorskip("torch")
    bad = [torch.full((2, 3), value) for value in (torch.inf, torch.nan)]
    given = torch.ones(32, dtype=torch.float16) * torch.nan
    for weight in bad:
        monkeypatch.setattr(
            torch.ops.espalier_format, "decode_weight", lambda *_arguments, weight=weight: weight, raising=False
        )
        assert chosen["weights"](given, given, given, "e2m1@2", 0, 0, 3, 2, torch.float16) is weight


@pytest.mark.gpu
@pytest.mark.parametrize(
    "adapter",
    [
        "torch_adapter",  # no capability of the kernels: its codes and weights are those of the torch decoder
        pytest.param(
            "operators_adapter", marks=pytest.mark.capability("CUDA kernels", "conformance level 3", device=True)
        ),
    ],
)
def test_cuda_conforms(adapter: str) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pytest.importorskip("espalier_format.kernels.ops")
    chosen = {
        kind: decoder
        for kind, decoder in decoders(adapter).items()
        if kind in ("codes", "weights", "load", "matmul", "experts")
    }
    report = run_conformance(chosen, device="cuda")
    assert messages(report) == []
    assert {report.verdict(level) for level in (2, 3)} == {"passed"}
