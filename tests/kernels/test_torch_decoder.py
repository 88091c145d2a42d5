"""The torch decoder: codes bit for bit, weights within the tolerance that it states."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from espalier_format.codec.codebook import CODEBOOKS, get_codebook
from espalier_format.codec.rotation import BLOCKS
from espalier_format.codec.rounding import OutputDtype
from espalier_format.errors import (
    DtypeError,
    NonFiniteScaleError,
    ScaleOverflowError,
    ShapeError,
    UsageError,
)
from espalier_format.kernels import numpy_decoder, reference

torch = pytest.importorskip("torch")
from espalier_format.kernels import torch_decoder  # noqa: E402

Maker = Callable[..., Any]
DTYPES: list[OutputDtype] = ["float32", "float16", "bfloat16"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


def tensors(module: Any, device: str = "cpu") -> tuple[Any, ...]:
    arrays = (torch.from_numpy(array.copy()).to(device) for array in (module.trellis, module.suh, module.svh))
    return (*arrays, module.codebook, *module.rotation)


def check_codes(module: Any, device: str) -> None:
    expected = reference.decode_codes(module.trellis, module.codebook)
    codes = torch_decoder.decode_codes(tensors(module, device)[0], module.codebook)
    assert codes.device.type == device
    got = codes.cpu().numpy()
    assert got.dtype == expected.dtype
    assert np.array_equal(got.view(f"u{got.itemsize}"), expected.view(f"u{got.itemsize}"))


def check_weight(module: Any, dtype: OutputDtype, device: str) -> None:
    weight = torch_decoder.decode_weight(*tensors(module, device), module.in_features, module.out_features, dtype)
    assert weight.shape == (module.out_features, module.in_features)
    assert weight.dtype == getattr(torch, dtype)
    assert weight.device.type == device
    assert weight.is_contiguous()
    exact = reference.decode_weight(*module.operands()).T[: module.out_features, : module.in_features]
    bound = torch_decoder.TOLERANCE[dtype]
    got = weight.to(torch.float64).cpu().numpy()
    # The reference has an error of its own, below 2^-50.
    assert np.all(np.abs(got - exact) <= (bound.relative + 2.0**-50) * np.abs(exact) + bound.absolute)


@quick
@given(
    name=st.sampled_from(list(CODEBOOKS)),
    rotation=st.tuples(st.sampled_from(BLOCKS), st.sampled_from(BLOCKS)),
    in_features=st.integers(1, 300),
    out_features=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
@pytest.mark.capability("torch decoder", "codes, bit for bit")
@pytest.mark.capability("torch decoder", "weights, within tolerance")
def test_codes_and_weights(
    name: str,
    rotation: tuple[int, int],
    in_features: int,
    out_features: int,
    dtype: OutputDtype,
    seed: int,
    random_module: Maker,
) -> None:
    module = random_module(name, rotation, in_features, out_features, seed)
    check_codes(module, "cpu")
    check_weight(module, dtype, "cpu")


@pytest.mark.parametrize("name", ["e2m1@1.5", "int8@6", "exl3-mcg@7", "exl3-mul1@3.5"])
def test_more_than_one_block(name: str, device: str, random_module: Maker) -> None:
    module = random_module(name, (64, 256), 1100, 700)
    check_codes(module, device)
    check_weight(module, "bfloat16", device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nearly_all_weights_are_correctly_rounded(dtype: OutputDtype, device: str, random_module: Maker) -> None:
    """What the tolerance says beside a midpoint: few weights differ from the numpy decoder's."""
    module = random_module("exl3-mul1@2.5", (128, 128), 384, 512)
    weight = torch_decoder.decode_weight(*tensors(module, device), 384, 512, dtype).cpu()
    expected = numpy_decoder.decode_weight(*module.operands(), 384, 512, dtype)
    got = weight.view(torch.int16).numpy() if dtype == "bfloat16" else weight.numpy()
    unsigned = f"u{got.itemsize}"
    assert np.count_nonzero(got.view(unsigned) != expected.view(unsigned)) <= got.size // 2000


def test_precision_switches_do_not_matter(random_module: Maker) -> None:
    """A user may allow float32 products in bfloat16 or TF32; exactness must not depend on it."""
    module = random_module("exl3-mul1@3", (128, 128), 256, 256)
    before = torch.get_float32_matmul_precision()
    first = torch_decoder.decode_weight(*tensors(module), 256, 256, "float32")
    try:
        torch.set_float32_matmul_precision("medium")
        second = torch_decoder.decode_weight(*tensors(module), 256, 256, torch.float32)
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(first.view(torch.int32), second.view(torch.int32))


def test_tables_are_made_once(random_module: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second module of a codebook builds and uploads nothing but its own tensors."""
    operands = tensors(random_module("int6@4", (64, 128), 128, 128))
    first = torch_decoder.decode_weight(*operands, 128, 128, "float32")
    codes = torch_decoder.decode_codes(operands[0], operands[3])

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError

    for name in ("from_numpy", "tensor", "as_tensor"):
        monkeypatch.setattr(torch, name, refuse)
    assert torch.equal(torch_decoder.decode_weight(*operands, 128, 128, "float32"), first)
    assert torch.equal(torch_decoder.decode_codes(operands[0], operands[3]), codes)


def test_scale_overflow_error(random_module: Maker) -> None:
    module = random_module("int8@5", (128, 128), 128, 128)
    trellis, suh, svh, *rest = tensors(module)
    operands = (trellis, torch.full_like(suh, 2000), torch.full_like(svh, 300), *rest, 128, 128)
    with pytest.raises(ScaleOverflowError, match="float16"):
        torch_decoder.decode_weight(*operands, "float16")
    assert torch.isfinite(torch_decoder.decode_weight(*operands, "bfloat16")).all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("side", [1, 2])
def test_non_finite_scale_error(bad: float, side: int, random_module: Maker) -> None:
    operands = tensors(random_module("int8@5", (32, 32), 32, 32))
    operands[side][31] = bad
    with pytest.raises(NonFiniteScaleError, match=("suh", "svh")[side - 1]):
        torch_decoder.decode_weight(*operands, 32, 32, "float32")


def test_wrong_operands_are_refused(random_module: Maker) -> None:
    trellis, suh, svh, codebook, _, _ = tensors(random_module("int6@4", (32, 64), 50, 60))
    decode = torch_decoder.decode_weight
    with pytest.raises(DtypeError):
        decode(trellis.to(torch.int32), suh, svh, codebook, 32, 64, 50, 60, "float32")
    with pytest.raises(DtypeError):
        decode(trellis, suh, svh.float(), codebook, 32, 64, 50, 60, "float32")
    with pytest.raises(ShapeError):
        torch_decoder.decode_codes(trellis[0], codebook)
    with pytest.raises(ShapeError):
        decode(trellis, suh[:-1], svh, codebook, 32, 64, 50, 60, "float32")
    with pytest.raises(ShapeError):
        decode(trellis, suh, svh, codebook, 32, 64, 50, 65, "float32")
    with pytest.raises(ShapeError):
        decode(trellis, suh, svh, codebook, 128, 64, 50, 60, "float32")
    with pytest.raises(UsageError):
        decode(trellis, suh, svh, codebook, 48, 64, 50, 60, "float32")
    for dtype in ("float64", torch.float64, torch.int8):
        with pytest.raises(UsageError):
            decode(trellis, suh, svh, codebook, 32, 64, 50, 60, dtype)


def test_tensors_of_a_tracer_are_not_kept() -> None:
    """Decoding while torch traces fails or gives fake tensors; what is decoded afterwards is right all the same."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    codebook = get_codebook("int5@3")
    trellis = torch.arange(64 * codebook.halfwords_per_tile, dtype=torch.int32).to(torch.int16).view(8, 8, -1)
    ones = torch.ones(128, dtype=torch.float16)
    operands = (trellis, ones, ones, codebook, 32, 32, 128, 128, "float32")
    torch_decoder._kept.clear()
    with FakeTensorMode(allow_non_fake_inputs=True), contextlib.suppress(Exception):
        torch_decoder.decode_weight(*operands)  # type: ignore[arg-type]
    exact = reference.decode_weight(trellis.numpy(), ones.numpy(), ones.numpy(), codebook, 32, 32)
    decoded = torch_decoder.decode_weight(*operands)  # type: ignore[arg-type]
    assert np.array_equal(decoded.numpy(), exact.T.astype(np.float32))
