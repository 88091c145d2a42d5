"""The product with a quantized weight on a CUDA device: what is launched."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from espalier_format.codec.codebook import CODEBOOKS, Codebook
from espalier_format.codec.tile import TILE
from espalier_format.kernels.cuda.compiler import Variant
from espalier_format.kernels.cuda.launch import launch
from espalier_format.kernels.cuda.loading import Preparation, load_kernel
from espalier_format.kernels.cuda.macros import codebook_macros
from espalier_format.kernels.cuda.matmul_plan import (
    WARPS,
    Device,
    has_stages,
    has_wide_table,
    make_plan,
    possible_tiles,
)
from espalier_format.kernels.cuda.workspace import arrival_counters
from espalier_format.kernels.linear import LinearOperand

if TYPE_CHECKING:
    from cuda.core import Kernel

_SYMBOLS: Final = ("matmul", "rotate_inputs")
_BIAS_KINDS: Final = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}


@lru_cache(maxsize=32)
def device_limits(index: int) -> Device:
    """Return what plans have to know of a CUDA device."""
    properties = torch.cuda.get_device_properties(index)
    shared_bytes = int(getattr(properties, "shared_memory_per_block_optin"))  # noqa: B009 - torch's stubs lack it
    return Device(properties.multi_processor_count, shared_bytes)


def launch_matmul(x: torch.Tensor, operand: LinearOperand, y: torch.Tensor) -> None:
    """Write the product with 1 to `Device.max_rows` rows to ``y``; the operands have been checked, and are aligned.

    ``x`` is float16 or bfloat16 (rows, in_features), rows of any stride; ``y`` of its dtype, (rows, out_features),
    contiguous.
    """
    index = x.get_device()
    rows = x.shape[0]
    codebook, bias = operand.codebook, operand.bias
    rotation_in, rotation_out = operand.rotation_in, operand.rotation_out
    in_features, out_features = operand.in_features, operand.out_features
    k_tiles, n_tiles, _ = operand.trellis.shape
    device = device_limits(index)
    plan = make_plan(codebook, rotation_in, rotation_out, k_tiles, n_tiles, rows, device)
    kernel, rotate_inputs, overlap = _kernels(
        codebook, plan.groups, rows == 1, plan.tiles, plan.wide_table, plan.staged, index
    )
    x_stride = x.stride(0)
    is_bfloat = int(x.dtype == torch.bfloat16)
    x_aligned = int(x.data_ptr() % 16 == 0 and x_stride % 8 == 0 and in_features % 8 == 0)

    parts = counters = prepared = exponents = 0
    if plan.contributions > 1:
        arrivals = arrival_counters(index, plan.blocks * rows)  # held until the launch, as the others
        counters = arrivals.data_ptr()
        floats = plan.blocks * plan.contributions * rows * plan.width
        sums = torch.empty(floats, dtype=torch.float32, device=x.device)
        parts = sums.data_ptr()
    if plan.prepared:
        values = torch.empty(rows * k_tiles * TILE + 2 * rows, dtype=torch.int16, device=x.device)
        prepared = values.data_ptr()
        exponents = prepared + 2 * rows * k_tiles * TILE
        launch(
            rotate_inputs,
            index,
            (rows, 1, 1),
            32 * WARPS,
            4 * -(-k_tiles // TILE) + 16,
            x.data_ptr(),
            operand.suh.data_ptr(),
            prepared,
            exponents,
            np.int64(x_stride),
            *_integers(is_bfloat, x_aligned, in_features, k_tiles, rotation_in),
            overlap=overlap,
        )
    launch(
        kernel,
        index,
        (plan.ranks, plan.thread_blocks, 1),
        32 * WARPS,
        plan.shared_bytes,
        x.data_ptr(),
        operand.trellis.data_ptr(),
        operand.suh.data_ptr(),
        operand.svh.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        parts,
        counters,
        prepared,
        exponents,
        np.int64(x_stride),
        *_integers(
            rows,
            is_bfloat,
            0 if bias is None else _BIAS_KINDS[bias.dtype],
            x_aligned,
            int(y.data_ptr() % 16 == 0 and out_features % 8 == 0),
            in_features,
            out_features,
            k_tiles,
            n_tiles,
            rotation_in,
            rotation_out,
            plan.unit_tiles,
            plan.slice_tiles,
            plan.column_groups,
            plan.buffers,
            plan.blocks,
            plan.units,
            plan.contributions,
            plan.sum_sets,
            plan.input_sets,
            plan.inputs_at,
            plan.sums_at,
            plan.words_at,
        ),
        _norm(rotation_in, rotation_out),
        overlap=overlap,
    )


@cache
def _kernels(
    codebook: Codebook, groups: int, one_row: bool, tiles: int, wide: bool, staged: bool, device_index: int
) -> tuple[Kernel, Kernel, bool]:
    """Return the kernels, and whether they may overlap with what stands before them."""
    macros = kernel_macros(codebook, groups, one_row, tiles, wide, staged)
    kernels = (load_kernel("matmul", symbol, macros, device_index) for symbol in _SYMBOLS)
    return *kernels, torch.cuda.get_device_capability(device_index) >= (9, 0)


def preparations(operand: LinearOperand, rows: int, index: int) -> set[Preparation]:
    """Return what `launch_matmul` needs for 1 to so many rows on a device; the operand may be on another one."""
    k_tiles, n_tiles, _ = operand.trellis.shape
    device, rotations = device_limits(index), (operand.rotation_in, operand.rotation_out)
    found = set()
    for count in range(1, min(rows, device.max_rows) + 1):
        plan = make_plan(operand.codebook, *rotations, k_tiles, n_tiles, count, device)
        kind = (operand.codebook, plan.groups, count == 1, plan.tiles, plan.wide_table, plan.staged)
        found.add(Preparation(_kernels, (*kind, index)))
    return found


def kernel_macros(
    codebook: Codebook, groups: int, one_row: bool, tiles: int, wide: bool, staged: bool
) -> dict[str, int | str]:
    """Return how the kernels are specialised, for a plan's groups, tiles, `Plan.wide_table` and `Plan.staged`."""
    return {
        **codebook_macros(codebook),
        "GROUPS": groups,
        "ONE_ROW": int(one_row),
        "TILES": tiles,
        "THREADS": 32 * WARPS,
        "WIDE_TABLE": int(wide),
        "STAGED": int(staged),
    }


def variants() -> Iterator[Variant]:
    """List how the kernels are compiled: every codebook for one row, and for a number of rows that changes."""
    roomy = Device(multiprocessors=132, shared_bytes=227 << 10)
    for turn, codebook in enumerate(CODEBOOKS.values()):
        groups = (1, 2, 4, 8)[turn % 4]
        tiles = possible_tiles(codebook, groups)[-1]
        wide, staged = has_wide_table(codebook, 1, roomy), has_stages(codebook, 1, roomy)
        yield Variant("matmul", _SYMBOLS, kernel_macros(codebook, 1, True, 2, wide, staged))
        yield Variant("matmul", _SYMBOLS, kernel_macros(codebook, groups, False, tiles, False, False))


@lru_cache(maxsize=4096)
def _integers(*values: int) -> tuple[Any, ...]:
    return tuple(map(np.int32, values))


@lru_cache(maxsize=32)
def _norm(rotation_in: int, rotation_out: int) -> np.float32:
    return np.float32(1 / np.sqrt(max(rotation_in, 1) * max(rotation_out, 1)))
