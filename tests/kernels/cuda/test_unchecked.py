"""Modules that nobody checked: operators do not look at values, but never hide a bad scale (spec/rotation.md §5.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from espalier_format.errors import EspalierError
from espalier_format.kernels import reference

torch = pytest.importorskip("torch")
from espalier_format.kernels import ops  # noqa: E402

pytestmark = pytest.mark.usefixtures("poisoned")

Maker = Callable[..., Any]

ROWS = [1, 8, 200]
"""In the kernel for one row, in that for some, and where the weight is decoded first."""


def product(module: Any, x: Any, device: str, module_tensors: Maker) -> Any:
    tensors = module_tensors(module, device)
    sizes = (module.in_features, module.out_features)
    return ops.matmul(x.to(device), *tensors, None, module.codebook, *module.rotation, *sizes)


def inputs(rows: int, columns: int, dtype: Any) -> Any:
    """Small numbers, with a zero in each row: zero times infinity is a NaN."""
    x = torch.from_numpy(np.random.default_rng(rows).standard_normal((rows, columns)) * 2.0**-8).to(dtype)
    x[:, 5] = 0
    return x


def spoil(module: Any, side: str, value: float) -> None:
    getattr(module, side)[5] = value


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("rotation", [(0, 0), (128, 128)])
@pytest.mark.parametrize("side", ["suh", "svh"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_bad_scale_shows_in_every_output_that_it_enters(
    side: str, value: float, rotation: tuple[int, int], rows: int, dtype: Any,
    cuda: str, random_module: Maker, module_tensors: Maker,
) -> None:  # fmt: skip
    """That of an input enters all outputs, that of an output its own; the others are what they were."""
    module = random_module("int5@3", rotation, 256, 128)
    x = inputs(rows, 256, dtype)
    clean = product(module, x, cuda, module_tensors)
    assert torch.isfinite(clean).all()
    spoil(module, side, value)
    got = product(module, x, cuda, module_tensors)
    if side == "suh":
        # An output whose own scale is zero may be zero times infinity, or nothing at all.
        live = torch.from_numpy(module.svh[:128] != 0).to(cuda)
        assert not torch.isfinite(got[:, live]).any()
        return
    assert not torch.isfinite(got[:, 5]).any()
    got[:, 5] = clean[:, 5]
    assert torch.equal(got, clean)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
def test_a_weight_that_overflows_is_right_or_shows(
    rows: int, cuda: str, random_module: Maker, module_tensors: Maker
) -> None:
    """The kernels that decode as they multiply hold weights exactly: what they give is right."""
    module = random_module("int8@5", (0, 0), 256, 128)
    module.suh[:] = 2.0**-7
    module.suh[7], module.svh[:] = 300, 1
    module.svh[3] = 600
    weight = reference.decode_weight(*module.operands())
    overflows = np.abs(weight) >= 65520
    assert overflows.any()
    assert not overflows[:, np.arange(128) != 3].any()
    x = inputs(rows, 256, torch.float16)
    x[:, 7] = 2.0**-10
    got = product(module, x, cuda, module_tensors).double().cpu().numpy()
    expected = x.double().numpy() @ weight
    right = np.abs(got - expected) <= 2.0**-7 * (1 + np.abs(expected))
    assert right[:, np.arange(128) != 3].all()
    assert (right | ~np.isfinite(got))[:, 3].all()


@pytest.mark.parametrize("rows", ROWS)
def test_on_a_cpu_they_refuse(rows: int, random_module: Maker, module_tensors: Maker) -> None:
    module = random_module("int8@5", (0, 0), 64, 32)
    spoil(module, "svh", float("nan"))
    with pytest.raises(EspalierError) as refusal:
        product(module, inputs(rows, 64, torch.float16), "cpu", module_tensors)
    assert refusal.value.code == "non-finite-scale"
    module.suh[:], module.svh[:] = 600, 600
    with pytest.raises(EspalierError) as refusal:
        product(module, inputs(rows, 64, torch.float16), "cpu", module_tensors)
    assert refusal.value.code == "scale-overflow"
