"""Kernels that start before the one before them in the stream has ended read what that one has written, and no less.

Each case runs once with the device idle between kernels, which gives what is expected, and then many times without, in
a stream and in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from espalier_format.kernels import reference

torch = pytest.importorskip("torch")
from espalier_format.kernels import ops  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="no CUDA device from 8.0 on",
    ),
]
Maker = Callable[..., Any]
NAMES = ("e2m1@2", "int6@4", "int8@6", "exl3-mul1@3", "exl3-mcg@2")
SIZE = 1024


def tensors_of(module: Any) -> list[Any]:
    """The operands on the device, with scales for which products have about the size of what is multiplied."""
    codes = reference.decode_codes(module.trellis, module.codebook).astype(np.float64) * module.codebook.value_scale
    suh = module.suh / (0.02 * codes.std() * np.sqrt(len(codes)))
    arrays = module.trellis, suh.astype(np.float16), module.svh
    return [torch.from_numpy(array.copy()).cuda() for array in arrays]


def repeat(work: Callable[[], list[Any]], times: int) -> list[list[Any]]:
    """What `work` returns in so many runs in a row, one half of them replays of a graph."""
    results = [[result.clone() for result in work()] for _ in range(times // 2)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = work()
    for _ in range(times - times // 2):
        graph.replay()
        results.append([output.clone() for output in outputs])
    return results


@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize("name", NAMES)
def test_a_product_of_a_product(name: str, rows: int, random_module: Maker) -> None:
    """Each product takes the result of the one before, which is still being written when it starts."""
    module = random_module(name, (128, 128), SIZE, SIZE)
    tensors = tensors_of(module)
    x = torch.randn(rows, SIZE, device="cuda", dtype=torch.float16)

    def chain(wait: bool = False) -> list[Any]:
        results = [x]
        for _ in range(6):
            results.append(ops.matmul(results[-1], *tensors, None, name, 128, 128, SIZE, SIZE))
            if wait:
                torch.cuda.synchronize()
        return results

    expected = chain(wait=True)
    assert 0.01 < expected[-1].float().std() < 100
    for results in repeat(chain, 40):
        assert all(torch.equal(result, right) for result, right in zip(results, expected, strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("last", range(3))
def test_operands_that_have_just_been_written(name: str, last: int, random_module: Maker) -> None:
    """The trellis, or the scales of one side, are overwritten by the kernel right before, and again right after."""
    modules = [tensors_of(random_module(name, (128, 128), SIZE, SIZE, seed)) for seed in range(3)]
    x = torch.randn(4, SIZE, device="cuda", dtype=torch.float16)
    operands = [torch.empty_like(tensor) for tensor in modules[0]]
    order = [i for i in range(3) if i != last] + [last]

    def work(wait: bool = False) -> list[Any]:
        results = []
        for module in modules:
            for operator in (decoded, multiplied):
                for i in order:
                    operands[i].zero_()
                    operands[i].copy_(module[i])
                if wait:
                    torch.cuda.synchronize()
                results.append(operator())
        return results

    def decoded() -> Any:
        return ops.decode_weight(*operands, name, 128, 128, SIZE, SIZE, torch.float16)

    def multiplied() -> Any:
        return ops.matmul(x, *operands, None, name, 128, 128, SIZE, SIZE)

    expected = work(wait=True)
    assert not any(torch.equal(expected[i], expected[i + 2]) for i in range(4))
    for results in repeat(work, 40):
        assert all(torch.equal(result, right) for result, right in zip(results, expected, strict=True))
