"""The product with a quantized weight as a torch operator: the same call on CPUs and CUDA devices.

On a CUDA device and for float16 and bfloat16 a kernel decodes the weight in registers while it multiplies, up to
`fused_rows` rows; above, the weight is decoded to the dtype of the activations by the kernel of `cuda.decode`, a block
of rows at a time, and multiplied by cuBLAS. Everything else is `linear.fallback_matmul`.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from espalier_format.codec.codebook import Codebook, get_codebook
from espalier_format.kernels.cuda import decode as cuda_decode
from espalier_format.kernels.cuda import matmul as cuda_matmul
from espalier_format.kernels.cuda.operands import aligned_operand
from espalier_format.kernels.linear import (
    GPU_BLOCK,
    LinearOperand,
    check_activations,
    fallback_matmul,
    plain_linear,
)
from espalier_format.kernels.no_derivative import call_operator, refuse_derivative
from espalier_format.kernels.numpy_decoder import row_blocks

_FUSED_ROWS: Final = ((1 << 23, 32), (1 << 24, 56))
"""Below so many weights, up to so many rows; see `fused_rows`."""
MOST_FUSED_ROWS: Final = 64
"""What `fused_rows` is at most."""


def fused_rows(weights: int) -> int:
    """Return the most rows for which a weight of so many elements is decoded inside the product on a CUDA device.

    With more, decoding it first and multiplying by cuBLAS is about as fast or faster on an H200, but for the largest
    weights, where it takes up to one and a half times as long at 96 rows (benchmarks/results/cuda-matmul.md): one
    launch takes `MOST_FUSED_ROWS`. A small weight is decoded soon, and leaves a product that decodes too few thread
    blocks to share its rows.
    """
    return next((rows for below, rows in _FUSED_ROWS if weights < below), MOST_FUSED_ROWS)


def register(library: Any) -> None:
    """Define ``matmul`` in a library and implement it for CPU, CUDA and Meta."""
    library.define(
        "matmul(Tensor x, Tensor trellis, Tensor suh, Tensor svh, Tensor? bias, str codebook, int rotation_in, "
        "int rotation_out, int in_features, int out_features) -> Tensor"
    )
    library.impl("matmul", _matmul_cpu, "CPU")
    library.impl("matmul", _matmul_cuda, "CUDA")
    torch.library.register_fake("espalier_format::matmul", _matmul_fake, lib=library)
    refuse_derivative("matmul", library)


def matmul(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    codebook: Codebook | str,
    rotation_in: int,
    rotation_out: int,
    in_features: int,
    out_features: int,
) -> torch.Tensor:
    """Return ``x @ W.T + bias`` for the weight W of a quantized module (spec/rotation.md §3).

    ``x`` is float32, float16 or bfloat16 of shape (..., in_features), with any strides; ``trellis`` int16 (in_p/16,
    out_p/16, W), ``suh`` float16 (in_p,), ``svh`` float16 (out_p,) and ``bias`` (out_features,), of any of the three
    dtypes or None, are contiguous; all are on one device; ``codebook`` is a codebook or its name. The result has the
    dtype of ``x`` and shape (..., out_features). The operator ``torch.ops.espalier_format.matmul``. It is for
    inference: ``backward`` through it raises UsageError, on every device.

    On a CUDA device and for float16 and bfloat16 nothing waits for the device, the call can be captured in a CUDA graph
    after one that was not, and the result is the same in every run. Up to `fused_rows` rows weights are exact, rotated
    activations have the precision of float16 (whatever their magnitude), sums are float32, and a result that the dtype
    can hold is not lost to an overflow on the way; memory beyond the result is a few partial sums. With more rows,
    weights are within `cuda.decode.TOLERANCE` of the exact ones and so rounded to the dtype of ``x`` (one beyond 65504
    is an infinity in float16), the bias is rounded to that dtype too, the sums are those of
    ``torch.nn.functional.linear`` in it, and memory beyond the result is that of about `GPU_BLOCK` weights, or of one
    rotation block of rows where that is more. Either way the values of scales are not looked at: whoever loads a module
    refuses bad ones, and for float16 weights that overflow it (`load_checks.check_scales`, spec/rotation.md §5.1). Of a
    module that nobody checked, every output that a bad scale enters is an infinity or a NaN. Float32, and other
    devices: as `linear.fallback_matmul`.

    Raises CodebookError, DtypeError, ShapeError, and UsageError for tensors on several devices, an unknown rotation
    block or a device that is too old; DependencyError on a CUDA device without cuda-core; and what the fallback raises.
    """
    import espalier_format.kernels.ops  # noqa: F401, PLC0415 - registers the operator; it imports this module

    return call_operator(
        torch.ops.espalier_format.matmul, x, trellis, suh, svh, bias, get_codebook(codebook).name, rotation_in,
        rotation_out, in_features, out_features,
    )  # fmt: skip


def _matmul_cpu(*arguments: Any) -> torch.Tensor:
    return fallback_matmul(*_checked(*arguments))


def _matmul_cuda(*arguments: Any) -> torch.Tensor:
    x, operand = _checked(*arguments)
    if x.dtype == torch.float32:
        return fallback_matmul(x, operand)
    rows = x.reshape(-1, operand.in_features)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    operand = aligned_operand(operand)
    padded_in, padded_out = operand.padded_size
    if rows.shape[0] > fused_rows(padded_in * padded_out):
        y = _decode_then_multiply(rows, operand)
    else:
        y = torch.empty((rows.shape[0], operand.out_features), dtype=x.dtype, device=x.device)
        most = cuda_matmul.device_limits(x.get_device()).max_rows
        for start in range(0, rows.shape[0], most):
            part = slice(start, start + most)
            cuda_matmul.launch_matmul(rows[part], operand, y[part])
    return y.view(*x.shape[:-1], operand.out_features)


def _matmul_fake(*arguments: Any) -> torch.Tensor:
    x, operand = _checked(*arguments)
    return x.new_empty((*x.shape[:-1], operand.out_features))


def _checked(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    bias: torch.Tensor | None,
    codebook: str,
    rotation_in: int,
    rotation_out: int,
    in_features: int,
    out_features: int,
) -> tuple[torch.Tensor, LinearOperand]:
    """Return the two sides of the product that the arguments of the operator are."""
    book = get_codebook(codebook)
    operand = LinearOperand(trellis, suh, svh, book, rotation_in, rotation_out, in_features, out_features, bias)
    check_activations(x, operand)
    return x, operand


def _decode_then_multiply(x: torch.Tensor, operand: LinearOperand) -> torch.Tensor:
    """Multiply by weights that are decoded to the dtype of ``x``, about `GPU_BLOCK` of them at a time."""
    bias = None if operand.bias is None else operand.bias.to(x.dtype)

    def product(block: slice) -> torch.Tensor:
        weight = cuda_decode.decode_weight(operand, x.dtype, block.start, block.stop)
        return plain_linear(x, weight, None if bias is None else bias[block])

    padded_in, _ = operand.padded_size
    blocks = tuple(row_blocks(operand.out_features, operand.rotation_out, padded_in, 4 * GPU_BLOCK))
    if len(blocks) == 1:
        return product(blocks[0])
    result = x.new_empty((x.shape[0], operand.out_features))
    for block in blocks:
        result[:, block] = product(block)
    return result
