"""What ``inspect`` and ``verify`` say about compressed-tensors checkpoints that contradict themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import Draft, Tensor, bf16
from compressed_tensors_cases import args, compress, one_module

from espalier_format.checkpoint import Checkpoint, open_checkpoint
from espalier_format.checkpoint.packed_module import PackedModule
from espalier_format.cli import main
from espalier_format.converters import compressed_tensors_library as library
from espalier_format.errors import EspalierError
from espalier_format.operations import compressed_tensors_findings
from espalier_format.operations.inspect import inspect_checkpoint
from espalier_format.operations.verify import verify_checkpoint

LAYER = "model.layers.0"
INDEX = "model.safetensors.index.json"


def _packed(outputs: int, inputs: int, bits: int) -> dict[str, Tensor]:
    words = np.random.default_rng(bits).integers(0, 2**31, (outputs, inputs * bits // 32)).astype(np.int32)
    return {
        "weight_packed": Tensor.of(words, "I32"),
        "weight_scale": bf16(np.full((outputs, inputs // 32), 0.5)),
        "weight_shape": Tensor.of(np.array([outputs, inputs]), "I64"),
    }


def _draft() -> Draft:
    """A checkpoint with nothing wrong: int4 in the layer, the head and MTP plain and ignored."""
    tensors: dict[str, Tensor] = {"model.embed_tokens.weight": bf16(np.ones((16, 64)))}
    for name in ("self_attn.q_proj", "mlp.experts.0.up_proj", "mlp.experts.1.up_proj"):
        tensors |= {f"{LAYER}.{name}.{kind}": part for kind, part in _packed(64, 64, 4).items()}
    tensors[f"{LAYER}.self_attn.q_proj.bias"] = bf16(np.ones(64))
    tensors[f"{LAYER}.mlp.gate.weight"] = bf16(np.ones((2, 64)))
    tensors["mtp.fc.weight"] = bf16(np.ones((64, 128)))
    tensors["lm_head.weight"] = bf16(np.ones((16, 64)))
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    block = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:^mtp.*", "re:.*mlp.gate$"],
        "version": "0.18.0",
    }
    return Draft(
        config={"model_type": "qwen3_5_moe", "text_config": {"mtp_num_hidden_layers": 1}, "quantization_config": block},
        shards={"model.safetensors": tensors},
    )


def _block(draft: Draft) -> dict[str, Any]:
    assert draft.config is not None
    block = draft.config["quantization_config"]
    assert isinstance(block, dict)
    return block


def _pack(draft: Draft, module: str, outputs: int, inputs: int) -> None:
    shard = draft.shards["model.safetensors"]
    del shard[f"{module}.weight"]
    shard |= {f"{module}.{kind}": part for kind, part in _packed(outputs, inputs, 4).items()}


def _dead_ignore(draft: Draft) -> None:
    _block(draft)["ignore"] += [f"model.layers.{n}.mlp.act_fn" for n in range(59)] + ["re:.*no_such_thing.*"]


def _dead_target(draft: Draft) -> None:
    _block(draft)["config_groups"]["group_1"] = {"targets": ["re:.*down_proj", "Linear"], "weights": {
        "num_bits": 4, "strategy": "group", "group_size": 32}}  # fmt: skip


def _ignored(draft: Draft) -> None:
    _block(draft)["ignore"].append("re:.*q_proj")


def _no_mtp(draft: Draft) -> None:
    del draft.shards["model.safetensors"]["mtp.fc.weight"]
    _block(draft)["ignore"].remove("re:^mtp.*")


def _mtp_packed(draft: Draft) -> None:
    _pack(draft, "mtp.fc", 64, 128)
    _block(draft)["ignore"].remove("re:^mtp.*")


def _mtp_packed_though_ignored(draft: Draft) -> None:
    _pack(draft, "mtp.fc", 64, 128)


def _mtp_plain_though_targeted(draft: Draft) -> None:
    _block(draft)["ignore"].remove("re:^mtp.*")


def _head(draft: Draft) -> None:
    _pack(draft, "lm_head", 16, 64)
    _block(draft)["ignore"].remove("lm_head")


def _head_targeted(draft: Draft) -> None:
    _block(draft)["ignore"].remove("lm_head")


def _index(draft: Draft) -> None:
    index = draft.right_index()
    index["weight_map"]["mtp.layers.0.x.weight"] = "mtp.safetensors"
    draft.index = index


CASES: dict[str, tuple[Callable[[Draft], None], str | None, str]] = {
    "ignore entries that match nothing": (_dead_ignore, None, "60 ignore entries (model.layers.0.mlp.act_fn, "),
    "a target that matches nothing": (_dead_target, "missing-tensor", "'group_1' matches no module"),
    "quantized though ignored": (_ignored, "unexpected-tensor", "(model.layers.0.self_attn.q_proj) quantized, though"),
    "no MTP tensors": (_no_mtp, "missing-tensor", "states 1 multi-token-prediction layers, but there are no tensors"),
    "MTP packed": (_mtp_packed, None, "1 MTP module (mtp.fc) packed: only runtimes that quantize the drafter"),
    "MTP packed though ignored": (_mtp_packed_though_ignored, "dtype", "(mtp.fc) packed, though the config ignores"),
    "MTP plain though targeted": (_mtp_plain_though_targeted, "dtype", "(mtp.fc) plain, though the config targets"),
    "packed head": (_head, None, "lm_head is packed (int4 g32): runtimes that expect plain weights"),
    "plain though targeted": (_head_targeted, None, "1 module (lm_head) stored plain, though the config targets"),
    "index": (_index, "index-mismatch", "names 1 tensor (mtp.layers.0.x.weight) that no shard holds"),
}


def test_a_checkpoint_without_contradictions_has_none(tmp_path: Path) -> None:
    source = _draft().write(tmp_path)
    assert inspect_checkpoint(source).warnings == ()
    report = verify_checkpoint(source, deep=True)
    assert (report.exit_code, report.findings) == (0, ())
    assert report.warnings == ("there is no manifest, so file sizes and hashes could not be checked",)
    assert {"groups", "packed"} <= {check.name for check in report.checks if check.outcome == "passed"}


@pytest.mark.parametrize("name", CASES)
def test_inspect_and_verify_report_the_same(name: str, tmp_path: Path) -> None:
    spoil, code, text = CASES[name]
    draft = _draft()
    spoil(draft)
    source = draft.write(tmp_path)
    shown = [warning for warning in inspect_checkpoint(source).warnings if text in warning]
    assert len(shown) == 1
    report = verify_checkpoint(source)
    if code is None:
        assert [warning for warning in report.warnings if text in warning] == shown
        assert (report.exit_code, report.findings) == (0, ())
    else:
        assert [(finding.code, str(finding)) for finding in report.findings] == [(code, shown[0])]
        assert report.exit_code == 1
    assert main(["verify", str(source)]) == (0 if code is None else 1)


def test_verify_looks_for_contradictions_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It compares every name with every pattern, which takes a while with thirty thousand experts."""
    calls: list[Checkpoint] = []
    real = compressed_tensors_findings.find_contradictions

    def find(checkpoint: Checkpoint) -> compressed_tensors_findings.Contradictions:
        calls.append(checkpoint)
        return real(checkpoint)

    monkeypatch.setattr(compressed_tensors_findings, "find_contradictions", find)
    report = verify_checkpoint(_draft().write(tmp_path))
    assert (report.exit_code, len(calls)) == (0, 1)
    assert [check.name for check in report.checks].count("groups") == 1


def test_inspect_shows_components_bits_and_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = _draft()
    _pack(draft, "lm_head", 16, 64)
    _block(draft)["ignore"].remove("lm_head")
    report = inspect_checkpoint(draft.write(tmp_path))
    assert (report.format, report.producer) == ("compressed-tensors", "compressed-tensors 0.18.0")
    assert (report.bits, report.head_bits) == (4.0, 4.0)
    storage = {component.name: [part.name for part in component.storage] for component in report.components}
    assert storage == {
        "experts": ["int4 g32"],
        "attention": ["int4 g32", "BF16"],
        "head": ["int4 g32"],
        "mtp": ["BF16"],
        "embeddings": ["BF16"],
        "other": ["BF16"],
    }
    assert report.expert_widths == {"experts": {"up_proj": {"4": 2}}}
    attention = next(part for part in report.components if part.name == "attention").quantized
    assert (attention.modules, attention.weights, attention.code_bytes) == (1, 4096, 2048)
    assert attention.scale_bytes == 64 * 2 * 2 + 16
    in_shards = sum(len(tensor.data) for shard in draft.shards.values() for tensor in shard.values())
    assert report.total.bytes == in_shards
    assert main(["inspect", str(tmp_path), "--experts"]) == 0
    assert "int4 g32" in capsys.readouterr().out


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize(
    ("tensor", "replacement", "code"),
    [
        ("weight_scale", bf16(np.full((64, 2), np.nan)), "non-finite-scale"),
        ("weight_shape", Tensor.of(np.array([64, 63]), "I64"), "shape"),
        ("weight_scale", bf16(np.full((64, 2), 3e38)), "scale-overflow"),
    ],
)
def test_verify_reads_the_values_of_every_module(
    tensor: str, replacement: Tensor, code: str, deep: bool, tmp_path: Path
) -> None:
    """A product that is too large shows only when it is decoded."""
    draft = _draft()
    draft.shards["model.safetensors"][f"{LAYER}.self_attn.q_proj.{tensor}"] = replacement
    report = verify_checkpoint(draft.write(tmp_path), deep=deep)
    found = [] if code == "scale-overflow" and not deep else [code]
    assert [finding.code for finding in report.findings] == found


def test_a_refusal_has_its_code_and_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = _draft()
    _block(draft)["format"] = "marlin-24"
    source = draft.write(tmp_path)
    assert main(["inspect", str(source), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "unsupported-source"
    with pytest.raises(EspalierError, match="'marlin-24'"):
        inspect_checkpoint(source)


def _library(source: Path) -> tuple[str, str, tuple[EspalierError, ...]]:
    report = verify_checkpoint(source, deep=True)
    check = next(check for check in report.checks if check.name == "library")
    return check.outcome, check.detail, check.findings


def test_deep_verification_asks_the_library_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _draft().write(tmp_path)
    outcome, detail, _ = _library(source)
    assert (outcome, detail.partition(" decodes ")[2]) == ("passed", "3 modules to the same bits")
    decode = library._bits_of

    def another(module: PackedModule, start: int, stop: int) -> Any:
        return decode(module, start, stop) ^ np.uint8(module.name.endswith("q_proj"))

    with monkeypatch.context() as patch:
        patch.setattr(library, "_bits_of", another)
        outcome, detail, findings = _library(source)
    assert (outcome, [finding.tensor for finding in findings]) == ("failed", [f"{LAYER}.self_attn.q_proj"])
    with monkeypatch.context() as patch:
        patch.setattr(library, "installed_version", lambda: None)
        assert _library(source)[0] == "skipped"


@pytest.mark.parametrize("bits", range(2, 9))
def test_the_library_is_asked_block_by_block(bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With zero points, whose words go across rows; and not at all for a layout that this release misreads."""
    monkeypatch.setattr(library, "_BLOCK_WEIGHTS", 1000)
    weight = torch.randn((75, 64), generator=torch.Generator().manual_seed(6)).to(torch.bfloat16)
    arguments = args(bits, 32, symmetric=False)
    tensors, _ = compress(weight, arguments, "pack-quantized")
    source = one_module(tensors, json.loads(arguments.model_dump_json())).write(tmp_path)
    with open_checkpoint(source) as checkpoint:
        module = checkpoint.packed["m"]
        assert library.compare(module)
        assert library.is_right(module, "0.20.1")
        assert library.is_right(module, "0.17.1") is (bits in (2, 4, 8))
