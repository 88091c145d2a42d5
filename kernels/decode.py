"""Decoding as torch operators: the same call on CPUs and CUDA devices.

On a CUDA device float16 and bfloat16 weights are decoded by one kernel, in one pass, without waiting for the device;
everything else goes to `torch_decoder`.
"""

from __future__ import annotations

from typing import Any

import torch

from espalier_format.codec.codebook import Codebook, get_codebook
from espalier_format.codec.dtype_names import DtypeName
from espalier_format.codec.rotation import padded
from espalier_format.codec.tile import TILE
from espalier_format.errors import UsageError
from espalier_format.kernels import torch_decoder
from espalier_format.kernels.cuda import decode as cuda_decode
from espalier_format.kernels.cuda.operands import check_contiguous_trellis, check_rows
from espalier_format.kernels.linear import FLOATS, LinearOperand, decode_rows
from espalier_format.kernels.no_derivative import call_operator, refuse_derivative
from espalier_format.kernels.operands import padded_size
from espalier_format.kernels.torch_dtypes import torch_dtype


def register(library: Any) -> None:
    """Define ``decode_codes`` and ``decode_weight`` in a library and implement them for CPU, CUDA and Meta."""
    library.define("decode_codes(Tensor trellis, str codebook) -> Tensor")
    library.impl("decode_codes", _codes_cpu, "CPU")
    library.impl("decode_codes", _codes_cuda, "CUDA")
    torch.library.register_fake("espalier_format::decode_codes", _codes_fake, lib=library)
    library.define(
        "decode_weight(Tensor trellis, Tensor suh, Tensor svh, str codebook, int rotation_in, int rotation_out, "
        "int in_features, int out_features, ScalarType dtype, int start=0, int? stop=None) -> Tensor"
    )
    library.impl("decode_weight", _weight_cpu, "CPU")
    library.impl("decode_weight", _weight_cuda, "CUDA")
    torch.library.register_fake("espalier_format::decode_weight", _weight_fake, lib=library)
    refuse_derivative("decode_weight", library)  # that of decode_codes has no argument that could need a gradient


def decode_codes(trellis: torch.Tensor, codebook: Codebook | str) -> torch.Tensor:
    """Decode the stored codes of a module, in the rotated basis (spec/packing.md), on the trellis's device.

    ``trellis`` is int16 (in_p/16, out_p/16, W), contiguous; ``codebook`` a codebook or its name. The result has shape
    (in_p, out_p) and is int8 for a grid, float16 for an EXL3 codebook, bit for bit what `reference.decode_codes`
    gives. The operator ``torch.ops.espalier_format.decode_codes``. Raises CodebookError, DtypeError and ShapeError,
    and on a CUDA device DependencyError without cuda-core.
    """
    import espalier_format.kernels.ops  # noqa: F401, PLC0415 - registers the operators; it needs what stands here

    result: torch.Tensor = torch.ops.espalier_format.decode_codes(trellis, get_codebook(codebook).name)
    return result


def decode_weight(
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: Codebook | str,
    rotation_in: int,
    rotation_out: int,
    in_features: int,
    out_features: int,
    dtype: DtypeName | torch.dtype,
    start: int = 0,
    stop: int | None = None,
) -> torch.Tensor:
    """Decode rows [start, stop) of the weight of a module, as in a Hugging Face ``.weight`` (spec/rotation.md §3).

    ``trellis`` is int16 (in_p/16, out_p/16, W), ``suh`` float16 (in_p,), ``svh`` float16 (out_p,), all contiguous
    and on one device; ``codebook`` is a codebook or its name; the rotation blocks are 0, 32, 64, 128 or 256; ``dtype``
    is float32, float16 or bfloat16, or its name; ``stop`` None is out_features. Rows need not start or stop at a
    rotation block or a tile. The result has shape (stop - start, in_features) and is contiguous. The operator
    ``torch.ops.espalier_format.decode_weight``; ``backward`` through it raises UsageError, on every device.

    On a CUDA device and for float16 and bfloat16, weights are within `cuda.decode.TOLERANCE` of the exact ones, the
    same in every run and for every choice of rows; nothing waits for the device, and no memory is used beside the
    result, except for copies of operands whose address is no multiple of 16 bytes. The values of scales are then not
    looked at: whoever loads a module refuses bad ones (`load_checks.check_scales`, spec/rotation.md §5.1). Of a module
    that nobody checked, an infinite or NaN scale gives weights that are not finite, and a weight too large for float16
    becomes an infinity. Otherwise weights are within `torch_decoder.TOLERANCE`, and it waits and raises.

    Raises CodebookError, DtypeError, ShapeError, and UsageError for an unknown rotation block or dtype, tensors on
    several devices or rows that do not exist; DependencyError on a CUDA device without cuda-core; `torch_decoder` also
    NonFiniteScaleError and ScaleOverflowError.
    """
    import espalier_format.kernels.ops  # noqa: F401, PLC0415 - as above

    return call_operator(
        torch.ops.espalier_format.decode_weight, trellis, suh, svh, get_codebook(codebook).name, rotation_in,
        rotation_out, in_features, out_features, torch_dtype(dtype), start, stop,
    )  # fmt: skip


def _codes_cpu(trellis: torch.Tensor, codebook: str) -> torch.Tensor:
    book = get_codebook(codebook)
    check_contiguous_trellis(trellis, book)
    return torch_decoder.decode_codes(trellis, book)


def _codes_cuda(trellis: torch.Tensor, codebook: str) -> torch.Tensor:
    book = get_codebook(codebook)
    check_contiguous_trellis(trellis, book)
    return cuda_decode.decode_codes(trellis, book)


def _codes_fake(trellis: torch.Tensor, codebook: str) -> torch.Tensor:
    book = get_codebook(codebook)
    check_contiguous_trellis(trellis, book)
    return trellis.new_empty(padded_size(tuple(trellis.shape)), dtype=torch.int8 if book.is_grid else torch.float16)


def _weight_cpu(*arguments: Any) -> torch.Tensor:
    return _decode_with_torch(*_checked(*arguments))


def _weight_cuda(*arguments: Any) -> torch.Tensor:
    operand, dtype, start, stop = _checked(*arguments)
    if dtype in cuda_decode.DTYPES:
        return cuda_decode.decode_weight(operand, dtype, start, stop)
    return _decode_with_torch(operand, dtype, start, stop)


def _weight_fake(*arguments: Any) -> torch.Tensor:
    operand, dtype, start, stop = _checked(*arguments)
    return operand.trellis.new_empty((stop - start, operand.in_features), dtype=dtype)


def _checked(
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
    rotation_in: int,
    rotation_out: int,
    in_features: int,
    out_features: int,
    dtype: torch.dtype,
    start: int = 0,
    stop: int | None = None,
) -> tuple[LinearOperand, torch.dtype, int, int]:
    """Return the module, the dtype and the rows [start, stop) that the arguments of the operator ask for."""
    book = get_codebook(codebook)
    operand = LinearOperand(trellis, suh, svh, book, rotation_in, rotation_out, in_features, out_features)
    if dtype not in FLOATS:
        raise UsageError("no such output dtype", expected=list(map(str, FLOATS)), got=dtype)
    return operand, dtype, start, check_rows(start, stop, out_features)


def _decode_with_torch(operand: LinearOperand, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
    if stop == start:
        return operand.trellis.new_empty((0, operand.in_features), dtype=dtype)
    # Whole rotation blocks are decoded, and the rows that are wanted cut out.
    block = operand.rotation_out or TILE
    top = start // block * block
    end = min(padded(stop, operand.rotation_out), operand.out_features)
    weight = decode_rows(operand, dtype, slice(top, end))
    rows = weight[start - top : stop - top]
    return rows if rows.shape == weight.shape else rows.clone()  # an operator's result owns its memory
