"""What early releases wrote otherwise: zero points that are not packed, a shape of I32, the name of the config."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import Tensor
from compressed_tensors_cases import args, compress, one_module, to_torch

from espalier_format.checkpoint import open_checkpoint
from espalier_format.converters import compressed_tensors_library as library
from espalier_format.converters.compressed_tensors import check_values, unpack_codes
from espalier_format.converters.compressed_tensors_packing import Packing
from espalier_format.errors import MissingTensorError, ShapeError, SourceError
from espalier_format.operations.convert import convert_checkpoint
from espalier_format.operations.inspect import inspect_checkpoint

OUTPUTS = 40


def _packed(bits: int, group: int | None, *, symmetric: bool = False) -> tuple[dict[str, Tensor], Tensor, str]:
    """Return a module as the library packs it today, what it decodes to, and its scheme."""
    weight = torch.randn((OUTPUTS, 96), generator=torch.Generator().manual_seed(bits)) + 0.7
    arguments = args(bits, group, symmetric=symmetric)
    tensors, expected = compress(weight.to(torch.bfloat16), arguments, "pack-quantized")
    return tensors, expected, arguments.model_dump_json()


@pytest.mark.parametrize("group", [32, None])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_zero_points_that_are_not_packed(bits: int, group: int | None, tmp_path: Path) -> None:
    """Releases up to 0.8 pack the weights alone."""
    tensors, expected, scheme = _packed(bits, group)
    zero = unpack_codes(tensors["weight_zero_point"].array().T, bits, OUTPUTS, Packing.DENSE).T
    assert np.unique(zero).size > 1
    tensors["weight_zero_point"] = Tensor.of(zero, "I8")
    with open_checkpoint(one_module(tensors, json.loads(scheme)).write(tmp_path)) as checkpoint:
        module = checkpoint.packed["m"]
        assert np.concatenate([module.rows(0, 7), module.rows(7, OUTPUTS)]).tobytes() == expected.data
        check_values(module)
        assert not library.is_right(module, "0.20.1")  # which takes them for packed ones


def test_a_zero_point_that_was_left_out_is_not_told_from_a_lost_one(tmp_path: Path) -> None:
    tensors, _, scheme = _packed(4, 32)
    del tensors["weight_zero_point"]
    with pytest.raises(MissingTensorError, match="early releases leave out one that is all 0"):
        open_checkpoint(one_module(tensors, json.loads(scheme)).write(tmp_path))


@pytest.mark.parametrize("group", [32, None])
def test_a_shape_of_short_numbers(group: int | None, tmp_path: Path) -> None:
    """Releases up to 0.8 declare I32; with one scale per row nothing else tells the number of inputs."""
    tensors, expected, scheme = _packed(4, group, symmetric=True)
    tensors["weight_shape"] = Tensor.of(to_torch(tensors["weight_shape"]).numpy(), "I32")
    with open_checkpoint(one_module(tensors, json.loads(scheme)).write(tmp_path / "a")) as checkpoint:
        module = checkpoint.packed["m"]
        assert (module.out_features, module.in_features) == (OUTPUTS, 96)
        assert module.rows(0, OUTPUTS).tobytes() == expected.data
        check_values(module)
    tensors["weight_shape"] = Tensor.of(np.array([OUTPUTS + 1, 96]), "I32")
    with (
        pytest.raises(ShapeError, match="weight_shape"),
        open_checkpoint(one_module(tensors, json.loads(scheme)).write(tmp_path / "b")) as checkpoint,
    ):
        check_values(checkpoint.packed["m"])


@pytest.mark.parametrize("place", ["compression_config", "text_config.quantization_config"])
def test_a_config_in_another_place(place: str, tmp_path: Path) -> None:
    """Where vLLM and compressed-tensors look on; transformers reads the top level alone."""
    tensors, expected, scheme = _packed(4, 32, symmetric=True)
    draft = one_module(tensors, json.loads(scheme))
    block = draft.config.pop("quantization_config")
    draft.config.update(
        {place: block} if "." not in place else {"text_config": {"quantization_config": block, "dtype": "bfloat16"}}
    )
    folder = draft.write(tmp_path / "source")
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.format == "compressed-tensors"
        assert checkpoint.packed["m"].rows(0, OUTPUTS).tobytes() == expected.data
    report = inspect_checkpoint(folder)
    assert (report.format, report.quant_method) == ("compressed-tensors", "compressed-tensors")
    convert_checkpoint(folder, tmp_path / "plain", to="hf")
    assert "compressed-tensors" not in (tmp_path / "plain" / "config.json").read_text()


def test_the_top_level_counts_and_a_null_does_not(tmp_path: Path) -> None:
    tensors, _, scheme = _packed(4, 32, symmetric=True)
    draft = one_module(tensors, json.loads(scheme))
    draft.config["compression_config"] = draft.config["quantization_config"]
    for number, (top, form) in enumerate({"fp8": "plain", "": "compressed-tensors"}.items()):
        draft.config["quantization_config"] = {"quant_method": top} if top else None
        with open_checkpoint(draft.write(tmp_path / str(number))) as checkpoint:
            assert checkpoint.format == form


def test_another_method_in_another_place_is_named_too(tmp_path: Path) -> None:
    draft = one_module({"weight": Tensor.of(np.ones((2, 2)), "F16")}, {})
    draft.config = {"text_config": {"quantization_config": {"quant_method": "fp8"}}}
    folder = draft.write(tmp_path / "source")
    with open_checkpoint(folder) as checkpoint:
        stated = "text_config.quantization_config states quant_method 'fp8', which is not read"
        assert any(line.startswith(stated) for line in checkpoint.warnings)
    with pytest.raises(SourceError, match="not quantized in a format that this library reads"):
        convert_checkpoint(folder, tmp_path / "out", to="hf")
