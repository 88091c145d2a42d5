"""Modules of one form are checked once, and yet each gets what is its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Draft, Tensor, bf16

from espalier_format.checkpoint import open_checkpoint
from espalier_format.checkpoint.tensors import TensorTable
from espalier_format.converters import compressed_tensors_modules
from espalier_format.converters.compressed_tensors_modules import plain_names
from espalier_format.errors import EspalierError, ShapeError

CHANNEL = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
GROUP = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def packed(outputs: int, words: int, inputs: int, groups: int) -> dict[str, Tensor]:
    return {
        "weight_packed": Tensor.of(np.full((outputs, words), 0x77777777), "I32"),
        "weight_scale": bf16(np.ones((outputs, groups), np.float32)),
        "weight_shape": Tensor.of(np.array([outputs, inputs]), "I64"),
    }


def draft(scheme: dict[str, Any], modules: dict[str, dict[str, Tensor]]) -> Draft:
    group = {"targets": ["Linear"], "weights": scheme, "format": "pack-quantized"}
    block = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}
    tensors = {f"{name}.{kind}": tensor for name, parts in modules.items() for kind, tensor in parts.items()}
    return Draft({"quantization_config": {**block, "version": "0.20.1"}}, {"model.safetensors": tensors})


def test_sizes_that_only_the_file_tells(tmp_path: Path) -> None:
    """With one scale per row, modules of equal tensors may differ in their inputs."""
    sizes = {"a": 30, "b": 32, "c": 25}
    source = draft(CHANNEL, {name: packed(8, 4, inputs, 1) for name, inputs in sizes.items()})
    with open_checkpoint(source.write(tmp_path)) as checkpoint:
        assert {name: module.in_features for name, module in checkpoint.packed.items()} == sizes


def test_a_thousand_modules_are_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {f"l.{n}.mlp.experts.{e}.up_proj": packed(8, 8, 64, 2) for n in range(10) for e in range(100)}
    modules |= {f"l.{n}.o_proj": packed(16, 8, 64, 2) for n in range(10)}
    calls = []
    real = compressed_tensors_modules._check
    monkeypatch.setattr(compressed_tensors_modules, "_check", lambda *given: (calls.append(1), real(*given))[1])
    with open_checkpoint(draft(GROUP, modules).write(tmp_path)) as checkpoint:
        assert list(checkpoint.packed) == list(modules)
        for name, module in checkpoint.packed.items():
            assert module.name == name
            assert (module.in_features, module.out_features) == (64, 8 if "experts" in name else 16)
            assert {tensor.name for tensor in module.tensors} == {f"{name}.{kind}" for kind in modules[name]}
    assert len(calls) == 2


@pytest.mark.parametrize("kind", ["weight_packed", "weight_scale", "weight_shape"])
@pytest.mark.parametrize("fault", ["shape", "dtype", "missing", "bias"])
def test_one_wrong_module_among_many_is_found(kind: str, fault: str, tmp_path: Path) -> None:
    modules = {f"m{number}": packed(8, 8, 64, 2) for number in range(30)}
    wrong = modules["m17"]
    if fault == "missing":
        del wrong[kind]
    elif fault == "bias":
        wrong["bias"] = bf16(np.ones(9, np.float32))
    elif fault == "dtype":
        wrong[kind] = Tensor("U8", (1,), b"x")
    else:
        wrong[kind] = Tensor.of(np.ones((5, 3)), {"weight_packed": "I32", "weight_scale": "F16"}.get(kind, "I64"))
    with pytest.raises(EspalierError) as caught:
        open_checkpoint(draft(GROUP, modules).write(tmp_path))
    assert (caught.value.tensor or "").startswith("m17")
    if fault == "bias":
        assert caught.type is ShapeError


def test_plain_names_are_the_rest(tmp_path: Path) -> None:
    modules = {
        "a": {**packed(8, 8, 64, 2), "bias": bf16(np.ones(8, np.float32))},
        "b": {"weight": bf16(np.ones((2, 2)))},
    }
    modules |= {"norm": {"weight": bf16(np.ones(2)), "bias": bf16(np.ones(2))}}
    with open_checkpoint(draft(GROUP, modules).write(tmp_path)) as checkpoint:
        assert tuple(checkpoint.plain) == ("b.weight", "norm.weight", "norm.bias")
        table = TensorTable(checkpoint.shards)
        assert list(plain_names(table, checkpoint.packed)) == list(checkpoint.plain)
        assert len(tuple(plain_names(table, {}))) == len(table.infos)
