"""Decoding on a GPU: codes bit for bit, weights within the stated tolerance, for all codebooks and rotations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from espalier_format.codec.codebook import CODEBOOKS
from espalier_format.codec.rotation import BLOCKS
from espalier_format.kernels import reference

torch = pytest.importorskip("torch")
from espalier_format.kernels.cuda import decode as cuda_decode  # noqa: E402
from espalier_format.kernels.decode import decode_codes, decode_weight  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

Maker = Callable[..., Any]
DTYPES = (torch.float16, torch.bfloat16)
ROTATIONS = [(side, other) for side in BLOCKS for other in BLOCKS]
ONE_OF_A_KIND = ("e2m1@1.5", "int5@3", "int6@4", "int8@6", "exl3-mul1@2.5", "exl3-mcg@3")
"""Codebooks of all families whose arithmetic differs, at widths whose windows lie differently."""

WARPGROUPS = ("e2m1@1.5", "int5@3", "int6@4", "exl3-mcg@3")
"""Made by the kernel of compute capability 9.0, where there is one: rotations up to 128, a multiple of eight inputs."""

REFERENCE_ERROR = 2.0**-50
"""Of the float64 reference, relative."""


def exact_weight(module: Any) -> np.ndarray[Any, Any]:
    weight: np.ndarray[Any, Any] = reference.decode_weight(*module.operands()).T
    return weight[: module.out_features, : module.in_features]


def check_weight(module: Any, weight: Any, exact: np.ndarray[Any, Any], rows: slice = slice(None)) -> None:
    """Compare rows of a weight with the exact ones."""
    got = weight.double().cpu().numpy()
    exact = exact[rows]
    assert got.shape == exact.shape
    bound = cuda_decode.TOLERANCE[str(weight.dtype).removeprefix("torch.")]
    out_scales, in_scales = module.svh[: module.out_features][rows], module.suh[: module.in_features]
    scales = np.abs(np.outer(out_scales.astype(np.float64), in_scales.astype(np.float64)))
    # A grid is summed exactly.
    rotation = 0.0 if module.codebook.is_grid else bound.rotation * np.abs(module.codebook.codes.astype(float)).max()
    allowed = (bound.relative + REFERENCE_ERROR) * np.abs(exact) + rotation * scales + bound.absolute
    assert np.all(np.abs(got - exact) <= allowed)
    # And what the worst case leaves room for does not happen: nearly all are rounded as if they were exact.
    nearest = torch.from_numpy(exact.copy()).to(weight.dtype).double().numpy()
    assert (got != nearest).mean() < 0.01
    assert np.all(got[scales == 0] == 0)


def decoded(module: Any, device: str, dtype: Any, tensors: Callable[..., Any], *rows: int) -> Any:
    operands = (module.codebook.name, *module.rotation, module.in_features, module.out_features, dtype, *rows)
    return decode_weight(*tensors(module, device), *operands)


@pytest.mark.parametrize("name", CODEBOOKS)
@pytest.mark.parametrize(("in_features", "out_features"), [(16, 16), (16 * 9, 16 * 17), (16 * 21, 16 * 5)])
@pytest.mark.capability("CUDA kernels", "codes, bit for bit", device=True)
def test_codes(
    name: str, in_features: int, out_features: int, cuda: str, random_module: Maker, module_tensors: Maker
) -> None:
    module = random_module(name, (0, 0), in_features, out_features)
    codes = decode_codes(module_tensors(module, cuda)[0], name).cpu().numpy()
    expected = reference.decode_codes(module.trellis, module.codebook)
    assert codes.dtype == expected.dtype
    assert codes.shape == expected.shape
    assert np.array_equal(codes.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize(
    ("name", "in_features"),
    [(name, 300) for name in CODEBOOKS] + [(name, 296) for name in CODEBOOKS],
)
@pytest.mark.capability("CUDA kernels", "weights, within tolerance", device=True)
def test_weights_of_every_codebook(
    name: str, in_features: int, cuda: str, random_module: Maker, module_tensors: Maker
) -> None:
    """In several blocks along both sides, the last of each cut off."""
    module = random_module(name, (128, 128), in_features, 420)
    exact = exact_weight(module)
    for dtype in DTYPES:
        check_weight(module, decoded(module, cuda, dtype, module_tensors), exact)


@pytest.mark.parametrize(
    ("name", "rotation", "in_features"),
    [(name, rotation, 333) for name in ONE_OF_A_KIND for rotation in ROTATIONS]
    + [(name, rotation, 328) for name in WARPGROUPS for rotation in ROTATIONS if max(rotation) <= 128],
)
@pytest.mark.capability("CUDA kernels", "weights, within tolerance", device=True)
def test_weights_of_every_rotation(
    name: str, rotation: tuple[int, int], in_features: int, cuda: str, random_module: Maker, module_tensors: Maker
) -> None:
    module = random_module(name, rotation, in_features, 520)
    exact = exact_weight(module)
    for dtype in DTYPES:
        check_weight(module, decoded(module, cuda, dtype, module_tensors), exact)


@pytest.mark.parametrize(
    ("name", "in_features", "out_features"),
    [("exl3-mul1@3", *sides) for sides in ((1, 1), (3, 2), (4, 130), (127, 129), (130, 1), (257, 16))]
    + [
        (name, *sides) for name in ("int5@2.5", "int6@3.5", "exl3-3inst@5") for sides in ((8, 2), (136, 129), (16, 300))
    ],
)
@pytest.mark.parametrize("rotation", [(0, 0), (32, 64), (128, 128), (256, 256)])
def test_odd_sizes(
    name: str,
    rotation: tuple[int, int],
    in_features: int,
    out_features: int,
    cuda: str,
    random_module: Maker,
    module_tensors: Maker,
) -> None:
    module = random_module(name, rotation, in_features, out_features)
    check_weight(module, decoded(module, cuda, torch.float16, module_tensors), exact_weight(module))


@pytest.mark.parametrize("rows", [(0, 1), (5, 6), (5, 5), (100, 300), (127, 129), (128, 256), (400, 401)])
@pytest.mark.parametrize(
    ("name", "rotation"),
    [("int5@2.5", (64, 256)), ("exl3-mcg@4", (64, 256)), ("int6@4", (128, 64)), ("exl3-3inst@2", (32, 128))],
)
@pytest.mark.parametrize("in_features", [384, 382, 381])
def test_rows_are_those_of_the_whole(
    name: str,
    rotation: tuple[int, int],
    rows: tuple[int, int],
    in_features: int,
    cuda: str,
    random_module: Maker,
    module_tensors: Maker,
) -> None:
    """Bit for bit."""
    module = random_module(name, rotation, in_features, 401)
    whole = decoded(module, cuda, torch.bfloat16, module_tensors)
    part = decoded(module, cuda, torch.bfloat16, module_tensors, *rows)
    assert torch.equal(part, whole[rows[0] : rows[1]])


@pytest.mark.parametrize("name", ["e2m1@2", "int6@3.5", "int8@6", "exl3-mcg@4"])
def test_more_blocks_than_fit_at_once(name: str, cuda: str, random_module: Maker, module_tensors: Maker) -> None:
    """Every thread block takes several; compared with the torch decoder, whose bound is tested elsewhere."""
    from espalier_format.kernels import torch_decoder

    module = random_module(name, (128, 128), 128 * 40, 128 * 30)
    tensors = module_tensors(module, cuda)
    got = decoded(module, cuda, torch.float16, module_tensors)
    expected = torch_decoder.decode_weight(
        *tensors, module.codebook, 128, 128, module.in_features, module.out_features, "float16"
    )
    exact = module.codebook.is_grid
    assert (got != expected).float().mean() < (1e-4 if exact else 1e-3)
    assert torch.allclose(got.float(), expected.float(), rtol=2**-10, atol=2**-24 if exact else 2**-18)


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormal_and_large_scales(dtype: Any, cuda: str, random_module: Maker, module_tensors: Maker) -> None:
    module = random_module("int8@6", (128, 32), 128, 64)
    module.suh[::3] = np.float16(6e-8)
    module.suh[1::3] = np.float16(200)
    module.svh[::2] = np.float16(-3e-6)
    check_weight(module, decoded(module, cuda, dtype, module_tensors), exact_weight(module))


def test_scales_that_are_not_finite_show(cuda: str, random_module: Maker, module_tensors: Maker) -> None:
    """Nothing is raised, as nothing may wait for the device; other rows are not touched."""
    module = random_module("e2m1@2", (0, 128), 64, 128)
    clean = decoded(module, cuda, torch.float16, module_tensors)
    module.svh[5] = np.nan
    got = decoded(module, cuda, torch.float16, module_tensors)
    assert torch.isnan(got[5]).all()
    got[5] = clean[5]
    assert torch.equal(got, clean)


def test_a_weight_too_large_is_an_infinity(cuda: str, random_module: Maker, module_tensors: Maker) -> None:
    module = random_module("int8@5", (0, 0), 16, 16)
    module.suh[:], module.svh[:] = 300, 300
    got = decoded(module, cuda, torch.float16, module_tensors)
    assert torch.isinf(got).any()
    assert not torch.isnan(got).any()


@pytest.mark.parametrize("offset", [1, 4])
def test_a_trellis_at_an_odd_address(offset: int, cuda: str, random_module: Maker, module_tensors: Maker) -> None:
    module = random_module("exl3-mul1@1.5", (128, 128), 128, 256)
    trellis, suh, svh = module_tensors(module, cuda)
    moved = torch.empty(trellis.numel() + offset, dtype=torch.int16, device=cuda)[offset:].view(trellis.shape)
    moved.copy_(trellis)
    shifted = torch.empty(suh.numel() + 1, dtype=torch.float16, device=cuda)[1:].copy_(suh)
    rest = (module.codebook.name, 128, 128, 128, 256, torch.float16)
    assert torch.equal(decode_weight(moved, shifted, svh, *rest), decode_weight(trellis, suh, svh, *rest))
    assert torch.equal(decode_codes(moved, module.codebook.name), decode_codes(trellis, module.codebook.name))


def test_every_form_of_the_kernel(
    cuda: str, random_module: Maker, module_tensors: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that only devices with less shared memory take."""
    for rotation in ((128, 128), (256, 256), (256, 64)):
        module = random_module("exl3-mul1@8", rotation, 300, 300)
        macros, _ = cuda_decode.weight_macros(module.codebook, *rotation, False, 99 << 10, 100 << 10)
        expected = decoded(module, cuda, torch.float16, module_tensors)
        whole = cuda_decode.weight_macros

        def small(*arguments: Any, whole: Any = whole) -> Any:
            return whole(*arguments[:-2], 99 << 10, 100 << 10)

        cuda_decode._specialisation.cache_clear()
        monkeypatch.setattr(cuda_decode, "weight_macros", small)
        got = decoded(module, cuda, torch.float16, module_tensors)
        monkeypatch.undo()
        cuda_decode._specialisation.cache_clear()
        assert torch.equal(got, expected), macros
