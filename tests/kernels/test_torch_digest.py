"""Decode digests by the torch decoder are the same as by the numpy one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from espalier_format.codec.codebook import CODEBOOKS
from espalier_format.errors import DtypeError, ShapeError
from espalier_format.kernels.digest import decode_digest

torch = pytest.importorskip("torch")
from espalier_format.kernels import torch_digest  # noqa: E402


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


@pytest.mark.parametrize("name", CODEBOOKS)
@pytest.mark.parametrize("block", [1 << 24, 16 * 48 * 3])
def test_same_digest(
    name: str, block: int, device: str, random_module: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one block, and in blocks of three rows of tiles, the last one shorter."""
    monkeypatch.setattr(torch_digest, "_BLOCK_WEIGHTS", block)
    module = random_module(name, (0, 0), 160, 48)
    module.trellis.setflags(write=False)
    expected = decode_digest(module.trellis, module.codebook)
    assert torch_digest.decode_digest(module.trellis, module.codebook, device) == expected


def test_wrong_operands_are_refused(random_module: Callable[..., Any]) -> None:
    module = random_module("int5@3", (0, 0), 32, 32)
    with pytest.raises(DtypeError):
        torch_digest.decode_digest(module.trellis.astype(np.int32), module.codebook, "cpu")
    with pytest.raises(ShapeError):
        torch_digest.decode_digest(module.trellis[..., :40], module.codebook, "cpu")
