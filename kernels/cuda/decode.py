"""Decode on a CUDA device: codes bit for bit, weights with both rotations in one pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from espalier_format.codec.codebook import CODEBOOKS, Codebook
from espalier_format.codec.rotation import BLOCKS
from espalier_format.kernels.cuda.compiler import Variant
from espalier_format.kernels.cuda.launch import launch
from espalier_format.kernels.cuda.loading import Preparation, load_kernel, reserved_shared_memory
from espalier_format.kernels.cuda.macros import codebook_macros
from espalier_format.kernels.cuda.operands import aligned, aligned_operand
from espalier_format.kernels.linear import LinearOperand

if TYPE_CHECKING:
    from cuda.core import Kernel

DTYPES: Final = (torch.float16, torch.bfloat16)
"""Output dtypes of the weight kernel."""


class Tolerance(NamedTuple):
    """A bound: ``|decoded - exact| <= relative |exact| + rotation G |suh svh| + absolute``, G the largest value."""

    relative: float
    rotation: float
    absolute: float


TOLERANCE: Final[Mapping[str, Tolerance]] = MappingProxyType(
    {
        "float16": Tolerance(2.0**-11 + 2.0**-21, 2.0**-10, 2.0**-25),
        "bfloat16": Tolerance(2.0**-8 + 2.0**-21, 2.0**-10, 0.0),
    }
)
"""How far a weight may be from the exact one, by output dtype. ``rotation`` is 0 for grids, whose sums are exact.

Within the bound of spec/rotation.md §6. Why it holds, with u = 2^-24:

- Scales and result: the factor 1/sqrt(b_in b_out), its product with suh, the product of the sum with svh and that of
  the two are four float32 roundings, below 2^-21 together; nothing underflows. Then one rounding to float16 or
  bfloat16: half an ulp, for subnormal float16 half their spacing.
- Grids: all sums are whole multiples of one unit and below 2^24 times that, so that float32 holds them, and what passes
  through float16 is exact there, alone or as two terms (``decode_weight.cu``, ``decode_weight_sm90.cu``).
- EXL3, relative to the sum of all magnitudes: up to four products of a tensor core, three additions, the split in
  two float16 terms, two products and three additions. An addition is off by u, the split by 4 u and the product that
  makes it by u; a product, with the additions in it, by 4 u: how tensor cores round is not documented, and the tests
  find them far better. That is 16 + 3 + 5 + 8 + 3 = 35 u. The sum of all magnitudes, over sqrt(b_in b_out), is at most
  sqrt(b_in b_out) G <= 256 G, and 35 * 256 u < 2^-10. With warpgroups: eight products, the split, two products and
  three additions, 32 + 5 + 8 + 3 = 48 u, and rotations of at most 128: 48 * 128 u < 2^-10.
"""

_BLOCK: Final = 128
_THREADS: Final = 256
_CODE_TILES: Final = 8
_SUMS_BYTES: Final = _BLOCK * _BLOCK * 4
_SCALES_BYTES: Final = 4 * _BLOCK * 2
_RESERVED_BYTES: Final = 1 << 10
"""Shared memory that a thread block takes besides its own."""

_MOST_RESIDENT: Final = {"e2m1": 3, "int6": 3}
"""Thread blocks that a multiprocessor holds at most, by family: more would leave too few registers. Else 2."""

_WARPGROUP_FAMILIES: Final = frozenset({"e2m1", "int5", "int6", "exl3-3inst", "exl3-mcg"})
"""What ``decode_weight_sm90.cu`` is made for, or faster for."""
_WARPGROUP: Final = 128
_CONSUMERS: Final = 2
_LARGEST_ROTATION: Final = 128
"""Of that kernel."""
_TABLE_START: Final = 1 << 10
"""The address in shared memory where its own has to begin: TABLE_START of codebook_tables.cuh, as loads have it."""
_STORED: Final = 8
"""Neighbours along the input that it stores at once."""


class _Specialisation(NamedTuple):
    """A loaded kernel and how it is launched."""

    kernel: Kernel
    threads: int
    shared_bytes: int
    resident_blocks: int
    norm: np.float32
    overlap: bool


def decode_codes(trellis: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """Decode the codes of checked operands; see `espalier_format.kernels.ops.decode_codes`."""
    in_tiles, out_tiles, _ = trellis.shape
    dtype = torch.int8 if codebook.is_grid else torch.float16
    codes = torch.empty((in_tiles * 16, out_tiles * 16), dtype=dtype, device=trellis.device)
    if codes.numel() == 0:
        return codes
    device = trellis.get_device()
    grid = (-(-out_tiles // _CODE_TILES), -(-in_tiles // _CODE_TILES), 1)
    trellis = aligned(trellis)  # a copy has to live until the launch: only then is its memory safe to give away
    arguments = (trellis.data_ptr(), codes.data_ptr(), np.int32(in_tiles), np.int32(out_tiles))
    launch(_codes_kernel(codebook, device), device, grid, _THREADS, 0, *arguments)
    return codes


def decode_weight(operand: LinearOperand, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
    """Decode rows [start, stop) of a weight, which exist, to float16 or bfloat16; see `kernels.ops.decode_weight`."""
    in_features = operand.in_features
    weight = torch.empty((stop - start, in_features), dtype=dtype, device=operand.trellis.device)
    if stop == start:
        return weight
    device = operand.trellis.get_device()
    chosen = _specialisation(*preparation(operand, dtype, device).arguments)
    blocks = -(-in_features // _BLOCK) * (-(-stop // _BLOCK) - start // _BLOCK)
    operand = aligned_operand(operand)  # copies have to live until the launch: only then is their memory safe to reuse
    in_tiles, out_tiles, _ = operand.trellis.shape
    launch(
        chosen.kernel,
        device,
        (min(blocks, chosen.resident_blocks), 1, 1),
        chosen.threads,
        chosen.shared_bytes,
        operand.trellis.data_ptr(),
        operand.suh.data_ptr(),
        operand.svh.data_ptr(),
        weight.data_ptr(),
        *(np.int32(number) for number in (in_tiles, out_tiles, in_features, start, stop)),
        chosen.norm,
        overlap=chosen.overlap,
    )
    return weight


def preparation(operand: LinearOperand, dtype: torch.dtype, device: int) -> Preparation:
    """Return what `decode_weight` needs on a device, for any rows; the operand may be on another one."""
    whole = operand.in_features % _STORED == 0
    rotations = (operand.rotation_in, operand.rotation_out)
    return Preparation(_specialisation, (operand.codebook, *rotations, dtype == torch.bfloat16, whole, device))


@cache
def _codes_kernel(codebook: Codebook, device: int) -> Kernel:
    return load_kernel("decode_codes", "decode_codes", codebook_macros(codebook), device)


@cache
def _specialisation(
    codebook: Codebook, rotation_in: int, rotation_out: int, bfloat16: bool, whole: bool, device: int
) -> _Specialisation:
    if whole and takes_warpgroups(codebook, rotation_in, rotation_out, device):
        return _warpgroup_specialisation(codebook, rotation_in, rotation_out, bfloat16, device)
    properties = torch.cuda.get_device_properties(device)
    # What a block may ask for beyond the default is missing from torch's own annotations.
    block_limit = int(getattr(properties, "shared_memory_per_block_optin"))  # noqa: B009
    limit = properties.shared_memory_per_multiprocessor
    macros, shared_bytes = weight_macros(codebook, rotation_in, rotation_out, bfloat16, block_limit, limit)
    kernel = load_kernel("decode_weight", "decode_weight", macros, device)
    resident = int(macros["RESIDENT"]) * properties.multi_processor_count
    unit = codebook.value_scale * 2.0**24 if codebook.is_grid else 1.0
    norm = _norm(unit, rotation_in, rotation_out)
    return _Specialisation(kernel, _THREADS, shared_bytes, resident, norm, overlap=False)


def _warpgroup_specialisation(
    codebook: Codebook, rotation_in: int, rotation_out: int, bfloat16: bool, device: int
) -> _Specialisation:
    macros = warpgroup_macros(codebook, rotation_in, rotation_out, bfloat16)
    kernel = load_kernel("decode_weight_sm90", "decode_weight_sm90", macros, device, specific=True)
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    norm = _norm(1.0, rotation_in, rotation_out)
    return _Specialisation(kernel, int(macros["THREADS"]), int(macros["SHARED_BYTES"]), blocks, norm, overlap=True)


def _norm(unit: float, rotation_in: int, rotation_out: int) -> np.float32:
    """Return what the sums of a rotation, in multiples of ``unit``, are multiplied by."""
    return np.float32(unit / math.sqrt(max(rotation_in, 1) * max(rotation_out, 1)))


def takes_warpgroups(codebook: Codebook, rotation_in: int, rotation_out: int, device: int) -> bool:
    """Tell whether a device runs ``decode_weight_sm90.cu``, and whether it is made for a codebook and rotations.

    Its table has a fixed address, so that a driver which reserves more or less shared memory would have it trap.
    """
    if codebook.family not in _WARPGROUP_FAMILIES or max(rotation_in, rotation_out) > _LARGEST_ROTATION:
        return False
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return reserved_shared_memory(device) == _TABLE_START


def warpgroup_macros(codebook: Codebook, rotation_in: int, rotation_out: int, bfloat16: bool) -> dict[str, int | str]:
    """Return the macros of ``decode_weight_sm90.cu``; SHARED_BYTES is its dynamic shared memory (weight_layout.cuh)."""
    halves_mixed_last = codebook.family == "int6" and rotation_in == _LARGEST_ROTATION
    producers = 4 if codebook.is_grid and not halves_mixed_last else 3
    table = 1 << 16 if codebook.is_grid else 0
    operand = 32 * (8 * 128 + 32) if codebook.is_grid else 16 * (16 * 128 + 32)
    staged = 4 * producers * (_BLOCK // 16) * 16 * codebook.half_steps
    rest = 64 * 64 * 2 + _CONSUMERS * 2 * _BLOCK * 4 + 32  # matrix, scales, barriers
    return dict(codebook_macros(codebook)) | {
        "ROTATION_IN": rotation_in,
        "ROTATION_OUT": rotation_out,
        "BFLOAT16": int(bfloat16),
        "WIDE_TABLE": 0,
        "THREADS": _WARPGROUP * (_CONSUMERS + producers),
        "SHARED_BYTES": table + 2 * (operand + staged) + rest,
    }


def weight_macros(
    codebook: Codebook, rotation_in: int, rotation_out: int, bfloat16: bool, block_limit: int, limit: int
) -> tuple[dict[str, int | str], int]:
    """Return the macros of ``decode_weight.cu`` and its dynamic shared memory in bytes.

    ``block_limit`` is the shared memory that a thread block may have, ``limit`` that of a multiprocessor, in bytes.
    Where the trellis of two blocks does not fit beside the sums, it is read from global memory.
    """
    sources = (2 if rotation_in == 256 else 1) * (2 if rotation_out == 256 else 1)
    trellis_bytes = 2 * sources * (_BLOCK // 16) ** 2 * 16 * codebook.half_steps
    table_bytes = 1 << codebook.index_bits if codebook.is_grid else 0
    shared_bytes = _SUMS_BYTES + trellis_bytes + _SCALES_BYTES + table_bytes
    staged = shared_bytes <= block_limit
    if not staged:
        shared_bytes -= trellis_bytes
    most = _MOST_RESIDENT.get(codebook.family, 2) if sources == 1 else 2
    resident = max(1, min(most, limit // (shared_bytes + _RESERVED_BYTES)))
    macros = dict(codebook_macros(codebook)) | {
        "ROTATION_IN": rotation_in,
        "ROTATION_OUT": rotation_out,
        "BFLOAT16": int(bfloat16),
        "STAGED": int(staged),
        "RESIDENT": resident,
    }
    return macros, shared_bytes


def variants() -> Iterator[Variant]:
    """List how the kernels are compiled: all codebooks, pairs of rotations and dtypes, though not all together."""
    for codebook in CODEBOOKS.values():
        yield Variant("decode_codes", ("decode_codes",), codebook_macros(codebook))
    pairs = [(side, other) for side in BLOCKS for other in BLOCKS]
    for turn, codebook in enumerate(CODEBOOKS.values()):
        # 128 and 128 for all, and another pair, with the shared memory of a small and a large architecture.
        for rotation, limit in (((128, 128), 228 << 10), (pairs[turn % len(pairs)], 100 << 10)):
            macros, _ = weight_macros(codebook, *rotation, turn % 2 == 1, limit - _RESERVED_BYTES, limit)
            yield Variant("decode_weight", ("decode_weight",), macros)
            if codebook.family in _WARPGROUP_FAMILIES and max(rotation) <= _LARGEST_ROTATION:
                warpgroups = warpgroup_macros(codebook, *rotation, turn % 2 == 1)
                yield Variant("decode_weight_sm90", ("decode_weight_sm90",), warpgroups)
