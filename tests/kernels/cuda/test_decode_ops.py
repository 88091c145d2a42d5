"""The decoding operators of torch: on CPUs, and on a GPU as part of graphs and compiled functions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from espalier_format.errors import (
    CodebookError,
    DtypeError,
    NonFiniteScaleError,
    ScaleOverflowError,
    ShapeError,
    UsageError,
)

torch = pytest.importorskip("torch")
from espalier_format.kernels import ops, torch_decoder  # noqa: E402
from espalier_format.kernels.decode import decode_codes, decode_weight  # noqa: E402

Maker = Callable[..., Any]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("cuda")) if request.param == "cuda" else "cpu"


@pytest.fixture
def operands(random_module: Maker, module_tensors: Maker, device: str) -> tuple[Any, ...]:
    """Arguments of decode_weight up to out_features: out side of four blocks of 64, the last cut off."""
    module = random_module("int5@2.5", (32, 64), 90, 250)
    return (*module_tensors(module, device), "int5@2.5", 32, 64, 90, 250)


def test_registering_again_changes_nothing(operands: tuple[Any, ...]) -> None:
    before = torch.ops.espalier_format.decode_codes(operands[0], "int5@2.5")
    ops.register()
    assert torch.equal(torch.ops.espalier_format.decode_codes(operands[0], "int5@2.5"), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [(0, None), (0, 64), (3, 7), (60, 70), (64, 250), (249, 250), (9, 9)])
def test_rows(operands: tuple[Any, ...], dtype: Any, rows: tuple[int, int | None]) -> None:
    trellis, suh, svh, name, *sizes = operands
    whole = torch_decoder.decode_weight(trellis, suh, svh, torch_decoder_codebook(name), *sizes, dtype)
    got = decode_weight(*operands, dtype, *rows)
    expected = whole[rows[0] : rows[1]]
    assert got.shape == expected.shape
    assert got.dtype == dtype
    assert got.is_contiguous()
    if got.device.type == "cpu" or dtype == torch.float32:
        assert torch.equal(got, expected)
    else:
        assert torch.allclose(got.float(), expected.float(), rtol=2**-7, atol=2**-24)


@pytest.mark.parametrize(("name", "dtype"), [("float16", torch.float16), ("bf16", torch.bfloat16)])
def test_a_dtype_by_its_name(operands: tuple[Any, ...], name: Any, dtype: Any) -> None:
    assert torch.equal(decode_weight(*operands, name), decode_weight(*operands, dtype))


@pytest.mark.parametrize("dtype", ["float64", torch.float64, "torch.float16", None])
def test_other_dtypes_are_refused(operands: tuple[Any, ...], dtype: Any) -> None:
    with pytest.raises(UsageError, match="no such output dtype"):
        decode_weight(*operands, dtype)


def test_there_is_no_derivative(operands: tuple[Any, ...]) -> None:
    """On no device: that a gradient is missing must not depend on it."""
    trellis, suh, svh, *rest = operands
    weight = decode_weight(trellis, suh.requires_grad_(), svh, *rest, torch.float16)
    with pytest.raises(UsageError, match="for inference"):
        weight.sum().backward()


def torch_decoder_codebook(name: str) -> Any:
    from espalier_format.codec.codebook import get_codebook

    return get_codebook(name)


def test_opcheck(operands: tuple[Any, ...]) -> None:
    """Schema, fake kernel, autograd registration and AOT dispatch, as torch checks them."""
    torch.library.opcheck(torch.ops.espalier_format.decode_codes.default, (operands[0], "int5@2.5"))
    for dtype in (torch.float32, torch.bfloat16):
        for rows in ((), (5, 200)):
            torch.library.opcheck(torch.ops.espalier_format.decode_weight.default, (*operands, dtype, *rows))


def test_meta_tensors(operands: tuple[Any, ...]) -> None:
    """Shapes and dtypes without numbers."""
    trellis, suh, svh, *rest = (value.to("meta") if isinstance(value, torch.Tensor) else value for value in operands)
    weight = decode_weight(trellis, suh, svh, *rest, torch.bfloat16, 10)
    assert (weight.shape, weight.dtype, weight.device.type) == ((240, 90), torch.bfloat16, "meta")
    codes = decode_codes(trellis, "int5@2.5")
    assert (codes.shape, codes.dtype) == ((96, 256), torch.int8)


@pytest.mark.parametrize("on_meta", [False, True])
def test_wrong_operands_are_refused(operands: tuple[Any, ...], on_meta: bool) -> None:
    """Before anything is launched, and while a graph is traced."""
    values = list(operands)
    if on_meta:
        values[:3] = [tensor.to("meta") for tensor in values[:3]]

    def refused(error: type[Exception], *changes: tuple[int, Any], dtype: Any = torch.float16, rows: Any = ()) -> None:
        changed = list(values)
        for index, value in changes:
            changed[index] = value
        with pytest.raises(error):
            decode_weight(*changed, dtype, *rows)

    trellis, suh, svh = values[:3]
    refused(CodebookError, (3, "int5@2"))
    refused(DtypeError, (0, trellis.int()))
    refused(DtypeError, (1, suh.float()))
    refused(DtypeError, (2, svh.bfloat16()))
    refused(ShapeError, (3, "int5@3"))
    refused(ShapeError, (0, trellis[:, :-1]))
    refused(ShapeError, (0, trellis.transpose(0, 1)))
    refused(ShapeError, (1, suh[:-1]))
    refused(ShapeError, (2, torch.cat([svh, svh])[::2]))
    refused(ShapeError, (5, 256), (2, svh[:-64]), (0, trellis[:, :-4].contiguous()))
    refused(ShapeError, (6, 97))
    refused(ShapeError, (7, 0))
    refused(UsageError, (4, 48))
    refused(UsageError, dtype=torch.float64)
    refused(UsageError, dtype=torch.int8)
    for rows in ((-1,), (0, 251), (8, 7)):
        refused(UsageError, rows=rows)
    with pytest.raises(DtypeError):
        decode_codes(trellis.int(), "int5@2.5")
    with pytest.raises(ShapeError):
        decode_codes(trellis.transpose(0, 1), "int5@2.5")
    with pytest.raises(CodebookError):
        decode_codes(trellis, "int5")


def test_tensors_on_two_devices_are_refused(operands: tuple[Any, ...]) -> None:
    trellis, suh, svh, *rest = operands
    with pytest.raises(UsageError):
        decode_weight(trellis, suh.to("meta"), svh, *rest, torch.float16)


def test_float32_looks_at_values(operands: tuple[Any, ...]) -> None:
    """As the torch decoder does, which it is; and so does every dtype on a CPU."""
    trellis, suh, svh, *rest = operands
    bad = svh.clone()
    bad[3] = float("inf")
    with pytest.raises(NonFiniteScaleError):
        decode_weight(trellis, suh, bad, *rest, torch.float32)
    if trellis.device.type == "cpu":
        large = torch.full_like(svh, 60000)
        with pytest.raises(ScaleOverflowError):
            decode_weight(trellis, torch.full_like(suh, 60000), large, *rest, torch.float16)


@pytest.mark.filterwarnings("ignore")  # of what inductor imports and advises
def test_compiled_function(operands: tuple[Any, ...]) -> None:
    def f(trellis: Any, suh: Any, svh: Any, x: Any) -> Any:
        weight = torch.ops.espalier_format.decode_weight(trellis, suh, svh, *operands[3:], torch.float32)
        return torch.nn.functional.linear(x, weight) + 1

    x = torch.randn(3, 90, device=operands[0].device)
    backend = "aot_eager" if operands[0].device.type == "cpu" else "inductor"
    compiled = torch.compile(f, fullgraph=True, backend=backend)
    assert torch.allclose(compiled(*operands[:3], x), f(*operands[:3], x), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_graph(cuda: str, random_module: Maker, module_tensors: Maker) -> None:
    """What is captured is decoded again at each replay, from what the tensors hold by then."""
    module = random_module("exl3-mul1@3", (128, 128), 256, 384)
    tensors = module_tensors(module, cuda)
    rest = (module.codebook.name, 128, 128, 256, 384, torch.bfloat16, 17, 300)
    decode_weight(*tensors, *rest)
    decode_codes(tensors[0], module.codebook.name)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weight = decode_weight(*tensors, *rest)
        codes = decode_codes(tensors[0], module.codebook.name)
    for seed in (1, 2):
        other = random_module("exl3-mul1@3", (128, 128), 256, 384, seed)
        for tensor, value in zip(tensors, module_tensors(other, cuda), strict=True):
            tensor.copy_(value)
        graph.replay()
        assert torch.equal(weight, decode_weight(*tensors, *rest))
        assert torch.equal(codes, decode_codes(tensors[0], module.codebook.name))


@pytest.mark.gpu
def test_loading_while_capturing(cuda: str, random_module: Maker, module_tensors: Maker) -> None:
    """A kernel that nobody has used before."""
    from espalier_format.kernels.cuda import decode as cuda_decode
    from espalier_format.kernels.cuda import loading

    module = random_module("int8@5", (64, 32), 192, 64)
    tensors = module_tensors(module, cuda)
    rest = (module.codebook.name, 64, 32, 192, 64, torch.float16)
    loading._load_once.cache_clear()
    cuda_decode._specialisation.cache_clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weight = decode_weight(*tensors, *rest)
    graph.replay()
    assert torch.equal(weight, decode_weight(*tensors, *rest))


@pytest.mark.gpu
def test_other_threads_and_streams(cuda: str, random_module: Maker, module_tensors: Maker) -> None:
    """A thread that has never called CUDA, on a stream of its own."""
    module = random_module("exl3-3inst@2", (128, 128), 256, 256)
    tensors = module_tensors(module, cuda)
    rest = (module.codebook.name, 128, 128, 256, 256, torch.float16)
    expected = decode_weight(*tensors, *rest)
    torch.cuda.synchronize()
    results: list[Any] = []

    def work() -> None:
        stream = torch.cuda.Stream(cuda)
        with torch.cuda.stream(stream):
            results.append(decode_weight(*tensors, *rest))
        stream.synchronize()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.gpu
def test_nothing_waits_for_the_device(
    cuda: str, random_module: Maker, module_tensors: Maker, no_waiting: Maker
) -> None:
    module = random_module("e2m1@2", (128, 128), 256, 256)
    tensors = module_tensors(module, cuda)
    rest = (module.codebook.name, 128, 128, 256, 256, torch.float16)
    decode_weight(*tensors, *rest)
    decode_codes(tensors[0], module.codebook.name)
    with no_waiting():
        decode_weight(*tensors, *rest)
        decode_codes(tensors[0], module.codebook.name)
