"""Weights of foreign quantizations are known by their tensors, and nothing else is taken for one."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import Draft, Tensor

from espalier_format.checkpoint import open_checkpoint
from espalier_format.checkpoint.quantized_tensors import QuantizedTensor, quantized_tensor
from espalier_format.errors import SourceError
from espalier_format.operations.convert import convert_checkpoint
from espalier_format.operations.inspect import inspect_checkpoint

FOREIGN = [
    ("GPTQ", "m.qweight", "I32", "m.scales"),
    ("AWQ", "m.qweight", "I32", "m.qzeros"),
    ("MLX", "m.weight", "U32", "m.scales"),
    ("AQLM", "m.codes", "I16", "m.scales"),
    ("EXL2", "m.q_weight", "I32", "m.q_scale"),
    ("HQQ", "m.W_q", "U8", "m.scale"),
    ("bitsandbytes in 8 bits", "m.weight", "I8", "m.SCB"),
    ("bitsandbytes in 4 bits", "m.weight", "U8", "m.weight.absmax"),
    ("FP8", "m.weight", "F8_E4M3", "m.weight_scale"),
    ("FP8 in blocks", "m.weight", "F8_E4M3", "m.weight_scale_inv"),
    ("FP8 under other names", "m.weight", "F8_E4M3", "m.scale"),
    ("FP8 in fused experts", "m.experts.down_proj", "F8_E4M3", "m.experts.down_proj_scale_inv"),
    ("MXFP4", "m.experts.down_proj_blocks", "U8", "m.experts.down_proj_scales"),
]
SIZES = {"I8": 1, "U8": 1, "F8_E4M3": 1, "I16": 2, "BF16": 2, "F16": 2, "F32": 4, "I32": 4, "U32": 4}


def tensor(dtype: str) -> Tensor:
    return Tensor(dtype, (4, 4), bytes(16 * SIZES[dtype]))


def draft(**tensors: str) -> Draft:
    """A plain checkpoint of tensors of these dtypes, beside a norm."""
    stored = {"m.norm.weight": tensor("BF16"), **{name: tensor(dtype) for name, dtype in tensors.items()}}
    return Draft(config={"model_type": "llama"}, shards={"model.safetensors": stored}, index=None)


@pytest.mark.parametrize(("weight", "dtype", "scales"), [row[1:] for row in FOREIGN], ids=[row[0] for row in FOREIGN])
def test_foreign_weights_are_known(weight: str, dtype: str, scales: str, tmp_path: Path) -> None:
    """Inspect says so, and convert does not say that they could be quantized."""
    folder = draft(**{scales: "F32", weight: dtype}).write(tmp_path / "m")
    with open_checkpoint(folder) as checkpoint:
        assert quantized_tensor(checkpoint.tensors) == QuantizedTensor(weight, scales)
    (warning,) = inspect_checkpoint(folder).warnings
    assert warning.startswith(f"{weight} is quantized, to judge by {scales}, in a way that is not read; ")
    with pytest.raises(SourceError, match="not quantized in a format that this library reads") as caught:
        convert_checkpoint(folder, tmp_path / "out", to="hf")
    assert "espalier-format quantize" not in str(caught.value)


@pytest.mark.parametrize(
    "tensors",
    [
        {"m.weight": "F16", "m.weight_scale": "F32", "m.scales": "F32", "m.scale": "F32"},  # as some norms have
        {"m.weight": "I32", "n.scales": "F32"},  # of another module
        {"m.weight": "F8_E4M3"},  # a cast, without scales
        {"logit_scale": "F32", "m.position_ids": "I32"},
        {"_scale": "F32", ".scales": "F32", "_scales": "F32"},
    ],
)
def test_what_is_no_quantized_weight(tensors: dict[str, str], tmp_path: Path) -> None:
    folder = draft(**tensors).write(tmp_path / "m")
    with open_checkpoint(folder) as checkpoint:
        assert quantized_tensor(checkpoint.tensors) is None
    assert inspect_checkpoint(folder).warnings == ()


def test_one_warning_is_enough(tmp_path: Path) -> None:
    """Where the config states the method, that is said, and no guess beside it."""
    source = draft(**{"m.qweight": "I32", "m.scales": "F32"})
    source.config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}
    (warning,) = inspect_checkpoint(source.write(tmp_path / "m")).warnings
    assert "quantization_config states quant_method 'gptq', which is not read" in warning
