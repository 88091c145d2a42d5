"""The torch decoder: vectorised, for tensors on the CPU or a CUDA device, in bounded memory.

Codes are bit-exact. Weights are within `TOLERANCE` of the exact value; the numpy decoder is the one that
rounds correctly. Rotations are done with float64 matrix products: the signed sums are exact in them (see
`espalier_format.kernels.numpy_decoder`), and unlike float32 products they do not change with
`torch.set_float32_matmul_precision` or the TF32 and bfloat16 switches of a back end. All integer arithmetic is
int32, which every back end has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from numpy.typing import NDArray

from espalier_format.codec.codebook import Codebook, get_codebook
from espalier_format.codec.dtype_names import DtypeName
from espalier_format.codec.rotation import kronecker_factors, padded
from espalier_format.codec.tile import TILE
from espalier_format.errors import (
    DtypeError,
    NonFiniteScaleError,
    ScaleOverflowError,
    ShapeError,
)
from espalier_format.kernels.operands import check_blocks, check_trellis_shape, check_true_size, padded_size
from espalier_format.kernels.windows import places, window_starts

# torch_dtypes first: it says what to install where torch is missing.
from espalier_format.kernels.torch_dtypes import torch_dtype  # isort: skip
import torch


class Tolerance(NamedTuple):
    """A bound of the form ``|decoded - exact| <= relative * |exact| + absolute``."""

    relative: float
    absolute: float


TOLERANCE: Final[Mapping[str, Tolerance]] = MappingProxyType(
    {
        "float32": Tolerance(2.0**-24 + 2.0**-50, 0.0),
        "float16": Tolerance(2.0**-11 + 2.0**-23, 2.0**-25),
        "bfloat16": Tolerance(2.0**-8 + 2.0**-23, 0.0),
    }
)
"""How far a decoded weight may be from the exact one, by output dtype: proved, not measured.

It is far inside what spec/rotation.md §6 allows. The sums are exact; the root, its quotient and the products with it
and both scales are five correctly rounded operations in float64, with a relative error below 5.01 * 2^-53 together.
Then torch rounds to float32 (half an ulp: 2^-24 of the value) and, for the narrow dtypes, again (2^-11 or 2^-8; for
subnormal float16 half their spacing, 2^-25). In particular a result is the correctly rounded one or, next to a midpoint
of two neighbours, the other of the two. float32 and bfloat16 cannot underflow. An exact zero gives +0.0.

Assumed are float64 matrix products that are exact where every partial sum is, as on CPUs and in the float64 units of
GPUs; no float64 product emulated by narrower ones is covered.
"""

_CPU_BLOCK: Final = (512, 1024, 128)
_GPU_BLOCK: Final = (2048, 2048, 2048)
"""Output and input features unpacked at a time, and output features rotated at a time."""


def decode_codes(trellis: torch.Tensor, codebook: Codebook | str) -> torch.Tensor:
    """Decode the stored codes of a module, in the rotated basis, on the trellis's device.

    ``trellis`` is int16 (in_p/16, out_p/16, W), ``codebook`` a codebook or its name; the result has shape
    (in_p, out_p) and is int8 for a grid, float16 for an EXL3 codebook, bit for bit what `reference.decode_codes`
    gives. Raises CodebookError, DtypeError and ShapeError.
    """
    codebook = get_codebook(codebook)
    _check_trellis(trellis, codebook)
    padded_in, padded_out = padded_size(tuple(trellis.shape))
    table = _code_table(codebook, trellis.device)
    result = torch.empty((padded_in, padded_out), dtype=table.dtype, device=trellis.device)
    height, length, _ = _block_size(trellis)
    for top in range(0, padded_in, height):
        for left in range(0, padded_out, length):
            part = result[top : top + height, left : left + length]
            tiles = trellis[top // TILE : (top + height) // TILE, left // TILE : (left + length) // TILE]
            states = torch.empty((tiles.shape[0], TILE, tiles.shape[1], TILE), dtype=torch.int32, device=trellis.device)
            _unpack_to(tiles, states.permute(1, 3, 0, 2))
            part.copy_(table.index_select(0, states.view(-1)).view(part.shape))
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
) -> torch.Tensor:
    """Decode the weight of a module as a Hugging Face ``.weight``, within `TOLERANCE`, on the trellis's device.

    ``trellis`` is int16 (in_p/16, out_p/16, W), ``suh`` float16 (in_p,), ``svh`` float16 (out_p,), all on one
    device; the rotation blocks are 0, 32, 64, 128 or 256; ``dtype`` is a name or the torch dtype. The result has
    shape (out_features, in_features) and is contiguous. Beyond it, memory is bounded by a block: about 4 MB on a
    CPU, 150 MB on a GPU. Waits for the device once, at the end, to check scales and overflow. Tables and Hadamard
    matrices stay on the device: some MB for the codebooks used last.

    Raises CodebookError, DtypeError, ShapeError, NonFiniteScaleError, ScaleOverflowError when a weight is too large
    for float16, and UsageError for an unknown dtype or rotation block.
    """
    codebook = get_codebook(codebook)
    target = torch_dtype(dtype)
    _check_trellis(trellis, codebook)
    padded_in, padded_out = padded_size(tuple(trellis.shape))
    check_blocks(padded_in, padded_out, rotation_in, rotation_out)
    check_true_size(padded_in, padded_out, in_features, out_features)
    _check_scales("suh", suh, padded_in)
    _check_scales("svh", svh, padded_out)
    # Looked at when all work is queued: the device is waited for once.
    bad = [~torch.isfinite(suh).all(), ~torch.isfinite(svh).all()]

    device = trellis.device
    values = _value_table(codebook, device)
    norm = codebook.value_scale / math.sqrt(max(rotation_in, 1) * max(rotation_out, 1))
    row_scales = svh.to(torch.float64).unsqueeze(1)
    column_scales = suh.to(torch.float64) * norm

    result = torch.empty((out_features, in_features), dtype=target, device=device)
    between_in, within_in = _factors(rotation_in, device)
    between_out, within_out = _factors(rotation_out, device)
    band, length, height = _block_size(trellis)
    height = max(height, rotation_out)
    for top in range(0, padded(out_features, rotation_out), band):
        for left in range(0, padded(in_features, rotation_in), length):
            tiles = trellis[left // TILE : (left + length) // TILE, top // TILE : (top + band) // TILE].transpose(0, 1)
            states = torch.empty((tiles.shape[0], TILE, TILE, tiles.shape[1]), dtype=torch.int32, device=device)
            _unpack_to(tiles, states.permute(2, 1, 0, 3))
            for upper in range(top, min(top + band, out_features), height):
                part = states[(upper - top) // TILE : (upper - top + height) // TILE]
                # H_out V^T H_in with entries +1 and -1, as in numpy_decoder._rotated_sums.
                sums = values.index_select(0, part.view(-1))
                if rotation_in:
                    sums = sums.view(-1, between_in.shape[0]) @ between_in
                sums = sums.view(-1, TILE, part.shape[3]).transpose(1, 2) @ within_in
                if rotation_out:
                    sums = within_out @ sums.view(part.shape[0], TILE, -1)
                    sums = between_out @ sums.view(-1, between_out.shape[0], TILE * TILE * part.shape[3])
                target_part = result[upper : min(upper + height, top + band), left : left + length]
                rows, columns = target_part.shape
                sums = sums.view(part.shape[0] * TILE, -1)[:rows, :columns]
                sums *= row_scales[upper : upper + rows]
                sums *= column_scales[left : left + columns]
                sums += 0.0  # -0.0 becomes +0.0
                target_part.copy_(sums)
    if target == torch.float16:
        bad.append(torch.isinf(result).any())
    bad_suh, bad_svh, *overflow = torch.stack(bad).tolist()
    for name, is_bad in (("suh", bad_suh), ("svh", bad_svh)):
        if is_bad:
            raise NonFiniteScaleError(f"{name} holds an infinity or a NaN")
    if any(overflow):
        raise ScaleOverflowError("a weight is too large for float16: its scales carry it past 65504")
    return result


# Tables are kept for good: a captured graph may hold their addresses, and to bring one to a device waits for it. All
# codebooks together take less than 24 MiB of each device.
_kept: Final[dict[tuple[str, object, torch.device], torch.Tensor]] = {}


def _keep(name: str, of: object, device: torch.device, make: Callable[[], NDArray[Any]]) -> torch.Tensor:
    """Return the array that ``make`` makes, on a device; made once."""
    table = _kept.get((name, of, device))
    if table is None:
        table = torch.from_numpy(make()).to(device)
        # A tracer hands out tensors without numbers. Kept, they would decode all that comes after to noise.
        if type(table) is torch.Tensor:
            _kept[name, of, device] = table
    return table


def _code_table(codebook: Codebook, device: torch.device) -> torch.Tensor:
    return _keep("codes", codebook, device, codebook.codes.copy)


def _value_table(codebook: Codebook, device: torch.device) -> torch.Tensor:
    """Return the codes as float64: 512 KiB."""
    return _keep("values", codebook, device, lambda: codebook.codes.astype("float64"))


def _factors(block: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    between, within = kronecker_factors(block)
    return _keep("between", block, device, between.copy), _keep("within", block, device, within.copy)


def _unpack_to(trellis: torch.Tensor, states: torch.Tensor) -> None:
    """Unpack tiles (A, B, W) into ``states``, an int32 view (16 rows, 16 columns, A, B) of any strides.

    The same as `windows.unpack_to`, except that neighbouring halfwords are joined to 32 bits first.
    """
    halfwords = trellis.shape[2]
    half_steps = halfwords // 8
    stored = trellis.permute(2, 0, 1).to(torch.int32) & 0xFFFF
    stream = torch.empty((halfwords + 1, *stored.shape[1:]), dtype=torch.int32, device=trellis.device)
    stream[1::2] = stored[1::2]  # storage swaps the halfwords of each pair
    stream[2::2] = stored[0::2]
    stream[0] = stream[halfwords]  # the ring is tail-biting
    pairs = stream[:-1] << 16
    pairs |= stream[1:]
    window = torch.empty((8, *stored.shape[1:]), dtype=torch.int32, device=trellis.device)
    for position, start in enumerate(window_starts(half_steps)):
        first, offset = divmod(start, 16)
        row, column = places(position)
        target = states[row, column : column + 8]
        if offset == 0:
            target.copy_(stream[first::half_steps])
        else:
            torch.bitwise_right_shift(pairs[first::half_steps], 16 - offset, out=window)
            torch.bitwise_and(window, 0xFFFF, out=target)


def _block_size(tensor: torch.Tensor) -> tuple[int, int, int]:
    return _CPU_BLOCK if tensor.device.type == "cpu" else _GPU_BLOCK


def _check_trellis(trellis: torch.Tensor, codebook: Codebook) -> None:
    if trellis.dtype != torch.int16:
        raise DtypeError("a trellis must be of 16-bit words", expected="int16", got=trellis.dtype)
    check_trellis_shape(tuple(trellis.shape), codebook)


def _check_scales(name: str, scales: torch.Tensor, size: int) -> None:
    if scales.dtype != torch.float16:
        raise DtypeError(f"{name} must be float16", expected="float16", got=scales.dtype)
    if tuple(scales.shape) != (size,):
        raise ShapeError(f"{name} does not fit the trellis", expected=(size,), got=tuple(scales.shape))
