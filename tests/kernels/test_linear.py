"""The linear layer in plain torch, against a float64 product with the reference decoder's weights.

The bounds are derived where they stand. Not checked here: the CUDA kernels (tests/kernels/cuda/test_matmul.py).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import DEFAULT_MODULES, Exl3Module, Module, espalier_draft, exl3_draft
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from espalier_format.checkpoint import open_checkpoint
from espalier_format.codec.codebook import CODEBOOKS
from espalier_format.codec.rotation import BLOCKS
from espalier_format.errors import CodebookError, DtypeError, NonFiniteScaleError, ShapeError, UsageError
from espalier_format.kernels import reference

torch = pytest.importorskip("torch")
from espalier_format.kernels import linear as linear_module  # noqa: E402
from espalier_format.kernels.linear import LinearOperand, linear  # noqa: E402

Maker = Callable[..., Any]

MODULES = (*DEFAULT_MODULES, Module("model.layers.0.self_attn.k_proj", 96, 64, "int5@3", (32, 32), bias="F64"))
EXL3_MODULES = (
    Exl3Module("model.layers.0.self_attn.q_proj", 96, 200, bias="F16"),
    Exl3Module("model.layers.0.self_attn.k_proj", 96, 200, 3, "mul1", "F32", unpadded_bias=True, packed_su=True),
    Exl3Module("model.layers.0.self_attn.v_proj", 96, 200, 2.5, "mul1", packed_sv=True),
)
LLAMA = {"model_type": "llama", "hidden_size": 96, "num_attention_heads": 8, "head_dim": 25, "num_hidden_layers": 1,
         "intermediate_size": 96, "vocab_size": 90}  # fmt: skip

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half the distance of 1 from its upper neighbour: the relative error of one rounding."""
SMALLEST_STEP = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}
"""The spacing of subnormal numbers."""


def operand_of(module: Any, bias: Any = None) -> LinearOperand:
    arrays = (torch.from_numpy(array.copy()) for array in (module.trellis, module.suh, module.svh))
    return LinearOperand(*arrays, module.codebook, *module.rotation, module.in_features, module.out_features, bias)


def check_product(module: Any, x: Any, bias: Any, got: Any) -> None:
    """Each output within the bound of a product with rounded weights and sums in at least the dtype of x.

    |error| <= (1 + n) u' A + 2 u |y| + 2 s + w with A = sum |x W| + |bias|: each weight is off by u (relative) or
    half a subnormal step; a sum of n products in float32 by at most n 2^-24 A. A CPU may round partial sums of narrow
    dtypes to them, in blocks: 4 u A allows for that. The result is rounded once or twice.
    """
    exact = reference.decode_weight(*module.operands())[: module.in_features, : module.out_features]
    inputs = x.to(torch.float64).numpy()
    offset = 0.0 if bias is None else bias.to(torch.float64).numpy()
    expected = inputs @ exact + offset
    magnitude = np.abs(inputs) @ np.abs(exact) + np.abs(offset)
    unit, step = UNIT_ROUNDOFF[x.dtype], SMALLEST_STEP[x.dtype]
    bound = (4 * unit + (module.in_features + 2) * 2.0**-24) * magnitude
    bound += 2 * unit * np.abs(expected) + 2 * step + step * np.abs(inputs).sum(-1, keepdims=True)
    assert got.dtype == x.dtype
    assert got.shape == (*x.shape[:-1], module.out_features)
    error = np.abs(got.to(torch.float64).numpy() - expected)
    assert np.all(error <= bound), float((error / bound).max())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(list(CODEBOOKS)),
    rotation=st.tuples(st.sampled_from(BLOCKS), st.sampled_from(BLOCKS)),
    in_features=st.integers(1, 300),
    out_features=st.integers(1, 300),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    rows=st.sampled_from([(), (1,), (5,), (2, 3)]),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_against_the_reference(
    name: str,
    rotation: tuple[int, int],
    in_features: int,
    out_features: int,
    dtype: Any,
    rows: tuple[int, ...],
    with_bias: bool,
    seed: int,
    random_module: Maker,
) -> None:
    module = random_module(name, rotation, in_features, out_features, seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((*rows, in_features), generator=generator).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype) if with_bias else None
    check_product(module, x, bias, linear(x, operand_of(module, bias)))


@pytest.mark.parametrize("rotation", [(128, 64), (0, 0)])
def test_many_blocks_are_one_product(
    rotation: tuple[int, int], random_module: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of rows of the smallest size give the same numbers, and no block is larger than asked for."""
    module = random_module("int6@4", rotation, 200, 333)
    x = torch.randn(3, 200)
    decoded = []
    decode = linear_module.torch_decoder.decode_weight

    def recorded(*arguments: Any) -> Any:
        decoded.append(decode(*arguments))
        return decoded[-1]

    monkeypatch.setattr(linear_module, "CPU_BLOCK", 1)
    monkeypatch.setattr(linear_module.torch_decoder, "decode_weight", recorded)
    check_product(module, x, None, linear(x, operand_of(module)))
    assert max(weight.shape[0] for weight in decoded) == (rotation[1] or 16)
    assert sum(weight.shape[0] for weight in decoded) == 333


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_autocast_changes_nothing(dtype: Any, random_module: Maker) -> None:
    """The result has the dtype of the activations, and so the precision."""
    module = random_module("int6@4", (32, 64), 96, 64)
    arrays = (torch.from_numpy(array.copy()) for array in (module.trellis, module.suh, module.svh))
    operand = LinearOperand(*arrays, module.codebook, *module.rotation, 96, 64)
    x = torch.randn(5, 96).to(dtype)
    expected = linear(x, operand)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear(x, operand), expected)


def test_no_rows_and_strided_rows(random_module: Maker) -> None:
    module = random_module("e2m1@2", (32, 32), 40, 50)
    operand = operand_of(module)
    assert linear(torch.empty(0, 40), operand).shape == (0, 50)
    wide = torch.randn(40, 4)
    check_product(module, wide.T, None, linear(wide.T, operand))


def test_an_operand_can_be_meta(random_module: Maker) -> None:
    """Frameworks build models without data first."""
    module = random_module("e2m1@2", (32, 32), 40, 50)
    operand = operand_of(module)
    meta = [tensor.to("meta") for tensor in (operand.trellis, operand.suh, operand.svh)]
    assert LinearOperand(*meta, module.codebook, 32, 32, 40, 50).trellis.is_meta


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"trellis": np.zeros((4, 4, 64), np.int16)}, DtypeError, "the trellis must be a torch tensor.*ndarray"),
        ({"suh": None}, DtypeError, "suh must be a torch tensor.*NoneType"),
        ({"svh": [1.0]}, DtypeError, "svh must be a torch tensor"),
        ({"bias": np.zeros(60, np.float32)}, DtypeError, "the bias must be a torch tensor"),
        ({"codebook": "int6@9"}, CodebookError, "unknown codebook 'int6@9'"),
        ({"codebook": None}, CodebookError, "unknown codebook None"),
        ({"in_features": 50.0}, UsageError, r"in_features must be an integer.*50\.0"),
        ({"out_features": "60"}, UsageError, "out_features must be an integer.*'60'"),
        ({"rotation_in": None}, UsageError, "rotation_in must be an integer"),
        ({"rotation_out": 64.0}, UsageError, "rotation_out must be an integer"),
    ],
)
def test_arguments_of_other_types_are_refused(
    random_module: Maker, change: dict[str, Any], error: type[Exception], match: str
) -> None:
    good = operand_of(random_module("int6@4", (32, 64), 50, 60))
    with pytest.raises(error, match=match):
        replace(good, **change)


def test_a_codebook_by_its_name(random_module: Maker) -> None:
    good = operand_of(random_module("int6@4", (32, 64), 50, 60))
    assert replace(good, codebook="int6@4").codebook is good.codebook


@pytest.mark.parametrize(
    "build", [lambda: espalier_draft(MODULES), lambda: exl3_draft(EXL3_MODULES, config=LLAMA)], ids=["espalier", "exl3"]
)
def test_modules_of_a_checkpoint(build: Callable[[], Any], tmp_path: Path) -> None:
    """With a bias of any dtype, of the true or the padded size, and with scales of any form."""
    with open_checkpoint(build().write(tmp_path / "checkpoint")) as checkpoint:
        biased = 0
        for name, module in checkpoint.modules.items():
            operand = LinearOperand.from_module(module)
            assert operand.codebook is module.codebook
            x = torch.randn(3, module.in_features)
            expected = x @ checkpoint.decode(name, "float32", "cpu").T
            if module.bias is not None:
                biased += 1
                assert operand.bias is not None
                kept = {"F64": torch.float32, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
                assert operand.bias.dtype == kept[module.bias.dtype]
                stored = checkpoint.decode(module.bias.name, "float32")[: module.out_features]
                expected += torch.from_numpy(stored.copy())
            torch.testing.assert_close(linear(x, operand), expected)
        assert biased >= 2
        with pytest.raises(UsageError, match="not available"):
            LinearOperand.from_module(module, "nowhere")


def test_wrong_operands_are_refused(random_module: Maker) -> None:
    good = operand_of(random_module("int6@4", (32, 64), 50, 60))
    trellis, suh, svh, book = good.trellis, good.suh, good.svh, good.codebook

    def make(*tensors: Any, rotation: tuple[int, int] = (32, 64), size: tuple[int, int] = (50, 60), **bias: Any) -> Any:
        return LinearOperand(*tensors, book, *rotation, *size, **bias)

    with pytest.raises(DtypeError, match="trellis"):
        make(trellis.to(torch.int32), suh, svh)
    with pytest.raises(DtypeError, match="svh"):
        make(trellis, suh, svh.float())
    with pytest.raises(DtypeError, match="bias"):
        make(trellis, suh, svh, bias=torch.zeros(60, dtype=torch.int64))
    with pytest.raises(ShapeError, match="codebook"):
        make(trellis[..., :32], suh, svh)
    with pytest.raises(ShapeError, match="suh"):
        make(trellis, suh[:-1], svh)
    with pytest.raises(ShapeError, match="bias"):
        make(trellis, suh, svh, bias=torch.zeros(64))
    with pytest.raises(ShapeError, match="true size"):
        make(trellis, suh, svh, size=(50, 65))
    with pytest.raises(ShapeError, match="rotation block"):
        make(trellis, suh, svh, rotation=(128, 64))
    with pytest.raises(UsageError, match="rotation block"):
        make(trellis, suh, svh, rotation=(48, 64))
    with pytest.raises(UsageError, match="device"):
        make(trellis, suh.to("meta"), svh)
    with pytest.raises(ShapeError, match="contiguous"):
        make(trellis.transpose(0, 1).contiguous().transpose(0, 1), suh, svh)


def test_wrong_activations_are_refused(random_module: Maker) -> None:
    operand = operand_of(random_module("int6@4", (32, 64), 50, 60))
    with pytest.raises(DtypeError, match="activations"):
        linear(torch.zeros(2, 50, dtype=torch.float64), operand)
    with pytest.raises(ShapeError, match="activations"):
        linear(torch.zeros(2, 64), operand)
    with pytest.raises(ShapeError, match="activations"):
        linear(torch.tensor(1.0), operand)
    with pytest.raises(UsageError, match="device"):
        linear(torch.zeros(2, 50, device="meta"), operand)


def test_non_finite_scales_are_refused(random_module: Maker) -> None:
    operand = operand_of(random_module("int6@4", (32, 64), 50, 60))
    operand.suh[3] = float("inf")
    with pytest.raises(NonFiniteScaleError, match="suh"):
        linear(torch.zeros(2, 50), operand)


def test_the_operator_is_well_formed(random_module: Maker) -> None:
    """Schema and fake implementation agree with the real one: what tracing and graphs rely on."""
    operand = operand_of(random_module("exl3-mul1@1.5", (32, 64), 50, 60), torch.randn(60))
    tensors = (torch.randn(2, 3, 50), operand.trellis, operand.suh, operand.svh, operand.bias)
    linear(tensors[0], operand)  # registers it
    operator = torch.ops.espalier_format.matmul.default
    sample = (*tensors, "exl3-mul1@1.5", 32, 64, 50, 60)
    torch.library.opcheck(operator, sample, test_utils=("test_schema", "test_faketensor"))
    meta = [tensor.to("meta") for tensor in tensors]
    assert operator(*meta, *sample[5:]).shape == (2, 3, 60)


def test_calling_needs_no_other_import() -> None:
    """`kernels.matmul` registers its operator when it is called, whatever else was imported."""
    code = (
        "import torch; from espalier_format.kernels.matmul import matmul; z = torch.zeros; h = torch.float16;"
        "print(matmul(z(1, 16), z(1, 1, 32, dtype=torch.int16), z(16, dtype=h), z(16, dtype=h), None, 'e2m1@2', 0, 0,"
        " 16, 16).shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "16" in done.stdout
