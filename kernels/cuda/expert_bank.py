"""The expert bank on a CUDA device: which kernel, how the work is cut, and the launch."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from espalier_format.codec.codebook import Codebook
from espalier_format.errors import UsageError
from espalier_format.kernels.cuda.compiler import Variant
from espalier_format.kernels.cuda.launch import launch
from espalier_format.kernels.cuda.loading import Preparation, load_kernel
from espalier_format.kernels.cuda.once import once
from espalier_format.kernels.cuda.operands import aligned, check_aligned
from espalier_format.kernels.cuda.workspace import arrival_counters
from espalier_format.kernels.expert_bank_layout import BankGeometry
from espalier_format.kernels.expert_bank_tensors import BankTensors

if TYPE_CHECKING:
    from cuda.core import Kernel

THREADS: Final = 512
"""Threads of a block."""

_MOST: Final = 512
"""Assignments of tokens to experts that one launch can take."""

_MOST_EXPERTS: Final = 32767
"""Experts of a bank: keys that assignments are sorted by, expert * 2^16 + assignment, must fit into an int."""

TEAM_WARPS: Final = 4
"""Warps that work on a task together."""

_PARTS: Final = 2
"""Of a tile (``lane_tile.cuh``)."""

_TOKENS: Final = 8
_COLUMNS: Final = 128
_ROW_BYTES: Final = (_COLUMNS + 4) * 4
_FIRST_ADDRESS: Final = 1024
"""Shared memory below is the driver's."""

_PRODUCT_BYTE: Final = ("e2m1", "int5")
"""Families whose table a byte of the product can index: their lookup takes an instruction less, and 64 KiB."""


class Plan(NamedTuple):
    """The macros of a kernel, its shared memory in bytes, and the numbers that its tables are filled with."""

    macros: dict[str, int | str]
    shared_bytes: int
    numbers: tuple[int, ...]


class _Form(NamedTuple):
    """How much shared memory is spent on what: log2 of the copies of each table, and inputs of a task."""

    by_byte: bool
    copies: dict[str, int]
    slice: int


_FORMS: Final = (
    _Form(True, {"int6": 5, "int8": 2}, 1024),
    _Form(True, {"int6": 5, "int8": 2}, 512),
    _Form(True, {"int6": 4, "int8": 1}, 512),
    _Form(True, {"int6": 4, "int8": 1}, 256),
    _Form(False, {"e2m1": 5, "int5": 5, "int6": 4, "int8": 0}, 512),
    _Form(False, {"e2m1": 4, "int5": 3, "int6": 2, "int8": 0}, 256),
    _Form(False, {"e2m1": 3, "int5": 2, "int6": 1, "int8": 0}, 256),
)


_VARIANTS: Final = (
    ("2048,512,128,128,128,128,128,128;e2m1@1,e2m1@2,int5@3", 232448),
    ("2048,512,128,128,128,128,128,128;exl3-mul1@2", 232448),
    ("330,100,0,32,256,64,64,0;e2m1@1.5,int6@4,int8@6", 232448),
    ("2048,512,128,128,128,128,128,128;e2m1@1,e2m1@2,int5@3", 101376),
    ("113,51,0,0,0,0,0,0;e2m1@2,exl3-3inst@3,exl3-mcg@2,exl3-mul1@2.5,int5@2.5,int6@3.5,int8@5", 101376),
)
"""Banks, and shared memory of a block, that the kernel is compiled for in the tests."""


def variants() -> list[Variant]:
    """Return ways in which the kernel is compiled: there is one for each set of codebooks, sizes and rotations."""
    return [
        Variant("expert_bank", ("expert_bank",), plan(BankGeometry.read(spelling), bfloat, limit).macros)
        for spelling, limit in _VARIANTS
        for bfloat in (False, True)
    ]


def plan(geometry: BankGeometry, bfloat: bool, shared_limit: int) -> Plan:
    """Specialise the kernel for a bank and a device where a block may have ``shared_limit`` bytes of shared memory."""
    for form in _FORMS:
        found = _plan(geometry, bfloat, form)
        if found.shared_bytes <= shared_limit:
            return found
    raise UsageError(
        "the device has too little shared memory for this bank", expected=found.shared_bytes, got=shared_limit
    )


def _plan(geometry: BankGeometry, bfloat: bool, form: _Form) -> Plan:
    tables, books, first_free, numbers = _tables(geometry.codebooks, form)
    macros: dict[str, int | str] = {
        "HIDDEN": geometry.hidden,
        "INTERMEDIATE": geometry.intermediate,
        **dict(zip(("IN_GATE", "OUT_GATE", "IN_UP", "OUT_UP", "IN_DOWN", "OUT_DOWN"), geometry.blocks, strict=True)),
        "BOOKS": " ".join(books),
        "TABLES": " ".join(tables),
        "FIRST_FREE": first_free,
        "BFLOAT": int(bfloat),
        "THREADS": THREADS,
        "TEAM_WARPS": TEAM_WARPS,
        "SLICE": form.slice,
        "ASSIGNMENTS": _MOST,
    }
    team = _TOKENS * (2 * form.slice + 16) + TEAM_WARPS // _PARTS * _TOKENS * _ROW_BYTES
    team += 4 * _TOKENS * (form.slice // _chunk(geometry)) + 2 * 13 * 4 + 8
    shared = THREADS // 32 // TEAM_WARPS * team + _MOST * (4 + 4 + 2 + 2 + 2 + 12 + 3) + 4 + 8 + _MOST // 8
    # The device code asserts that its struct Shared, which this adds up, is no larger.
    macros["SHARED_BYTES"] = shared
    return Plan(macros, first_free + shared, tuple(numbers))


def _tables(books: tuple[Codebook, ...], form: _Form) -> tuple[list[str], list[str], int, list[int]]:
    """Return the macros TABLE and BOOK, the end of the tables in shared memory, and the numbers in them."""
    families = {book.family: book for book in books if book.is_grid}
    tables: list[str] = []
    numbers: list[int] = []
    places: dict[str, tuple[int, int, int]] = {}  # kind, log2 of copies, address
    top = _FIRST_ADDRESS
    by_byte = [name for name in _PRODUCT_BYTE if name in families and form.by_byte]
    for number, name in enumerate(by_byte):
        places[name] = (1, 5, top + 128 * number)
    top += 65536 if by_byte else 0
    for family, book in families.items():
        if family not in places:
            places[family] = (0, form.copies[family], top)
            top += 4 << (form.copies[family] + book.index_bits)
    for family, book in families.items():
        kind, copies, address = places[family]
        spread, stride = (8, 256) if kind else (book.index_bits, 4 << copies)
        tables.append(f"TABLE({len(numbers)},{book.index_bits},{spread},{copies},{stride},{address})")
        numbers += _numbers(book)
    fields = []
    for number, book in enumerate(books):
        kind, copies, address = places.get(book.family, (3 if book.family == "exl3-mul1" else 2, 0, 0))
        constants = (number, book.half_steps, kind, f"{book.multiplier}u", f"{book.addend}u", book.index_bits)
        fields.append(f"BOOK({','.join(map(str, (*constants, copies, address)))})")
    return tables, fields, top, numbers


def _numbers(book: Codebook) -> list[int]:
    """Return the float16 patterns of a grid, by the high bits of the product."""
    index = (np.arange(1 << 16, dtype=np.uint32) * np.uint32(book.multiplier)) >> np.uint32(32 - book.index_bits)
    table = np.zeros(1 << book.index_bits, np.float16)
    table[index] = book.codes.astype(np.float16) * np.float16(book.value_scale)
    numbers: list[int] = table.view(np.uint16).tolist()
    return numbers


class _Specialisation(NamedTuple):
    """A loaded kernel and how it is launched."""

    kernel: Kernel
    shared_bytes: int
    numbers: torch.Tensor
    multiprocessors: int
    slice: int
    overlap: bool
    """Whether it may start before the one before it has ended."""


# Once and without limit: captured CUDA graphs hold the address of ``numbers``, which must live as long as they may be
# replayed.
# There is one entry for each kind of layer of the models in a process, of a few hundred bytes.
@once
def _specialisation(spelling: str, bfloat: bool, device: int) -> _Specialisation:
    properties: Any = torch.cuda.get_device_properties(device)  # not annotated in full
    chosen = plan(BankGeometry.read(spelling), bfloat, properties.shared_memory_per_block_optin)
    kernel = load_kernel("expert_bank", "expert_bank", chosen.macros, device)
    numbers = torch.tensor(chosen.numbers or (0,), dtype=torch.int32).to(torch.int16).to(f"cuda:{device}")
    return _Specialisation(
        kernel,
        chosen.shared_bytes,
        numbers,
        properties.multi_processor_count,
        int(chosen.macros["SLICE"]),
        torch.cuda.get_device_capability(device) >= (9, 0),
    )


def preparation(bank: BankTensors, dtype: torch.dtype, device: int) -> Preparation:
    """Return what `launch_expert_bank` needs on a device; the bank may be on another one."""
    return Preparation(_specialisation, (bank.spelling, dtype == torch.bfloat16, device))


class Cut(NamedTuple):
    """How the work of one launch is cut into tasks (``expert_bank.cu``)."""

    a_slices: int
    """Slices of the inputs of gate and up, each a task of its own."""
    b_slices: int
    """The same of down."""
    a_together: int
    """Blocks of 128 columns in one task of gate or up."""
    b_together: int
    """The same of down."""


@lru_cache(maxsize=4096)
def cut(geometry: BankGeometry, num_experts: int, assignments: int, largest_slice: int, teams: int) -> Cut:
    """Choose the tasks: enough of them that all teams have work, and then as large ones as possible.

    ``assignments`` are tokens times experts of each; the experts are taken to be drawn at random.
    """
    groups = num_experts * (1 - (1 - 1 / num_experts) ** assignments) + assignments / 16
    chunk = _chunk(geometry)
    found: list[tuple[int, int]] = []
    # Those of gate and up take longer, and nothing is left to fill gaps behind those of down.
    for projections, enough in (((0, 1), 4), ((2,), 3)):
        inputs, blocks = _size(geometry, projections)
        slices, most = -(-inputs // largest_slice), -(-inputs // chunk)
        tasks = groups * len(projections) * blocks
        while slices * 2 <= most and tasks * slices < 0.75 * teams:
            slices *= 2
        together = 1
        while together < min(blocks, 4) and tasks * slices / together >= enough * teams:
            together *= 2
        found.append((slices, together))
    (a_slices, a_together), (b_slices, b_together) = found
    return Cut(a_slices, b_slices, a_together, b_together)


def _chunk(geometry: BankGeometry) -> int:
    """Return how many features a warp rotates at once."""
    return 256 if max(geometry.blocks) > 128 else 128


def _size(geometry: BankGeometry, projections: tuple[int, ...]) -> tuple[int, int]:
    """Return the inputs of the largest of some projections, and its blocks of 128 columns."""
    inputs, outputs = (max(geometry.padded_sizes(each)[side] for each in projections) for side in (0, 1))
    return inputs, -(-outputs // _COLUMNS)


@lru_cache(maxsize=4096)
def pieces(geometry: BankGeometry, work: Cut) -> tuple[np.int32, ...]:
    """Return, of gate and up and then of down: slices, chunks of each, blocks of a task, and tasks of a slice."""
    chunk = _chunk(geometry)
    found: list[int] = []
    for projections, slices, together in (
        ((0, 1), work.a_slices, work.a_together),
        ((2,), work.b_slices, work.b_together),
    ):
        inputs, blocks = _size(geometry, projections)
        chunks = -(-inputs // chunk)
        found += (slices, -(-chunks // slices), together, -(-blocks // together))
    return tuple(np.int32(number) for number in found)


_WEIGHT_KINDS: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def launch_expert_bank(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    bank: BankTensors,
) -> torch.Tensor:
    """Compute the result of checked operands; see `espalier_format.kernels.expert_bank.expert_bank`.

    ``x`` is float16 or bfloat16. One launch for up to 512 assignments of tokens to experts, several for more. Raises
    DependencyError and UsageError as `loading.load_kernel`, and UsageError for more than 512 experts of a token, for
    more than 32,767 of the bank, and for a trellis or scales that are not aligned to 16 bytes.
    """
    tokens, top_k = expert_ids.shape
    if bank.num_experts > _MOST_EXPERTS:
        raise UsageError("too many experts of one bank", expected=f"at most {_MOST_EXPERTS}", got=bank.num_experts)
    check_aligned("the trellis", bank.trellis)
    check_aligned("scales", bank.scales)
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens == 0 or top_k == 0:
        return result.zero_()
    if top_k > _MOST:
        raise UsageError("too many experts of one token", expected=f"at most {_MOST}", got=top_k)
    x, expert_ids, expert_weights = x.contiguous(), expert_ids.contiguous(), expert_weights.contiguous()
    at_once = _MOST // top_k
    for start in range(0, tokens, at_once):
        rows = slice(start, start + at_once)
        _launch_once(result[rows], aligned(x[rows]), expert_ids[rows], expert_weights[rows], bank)
    return result


def _launch_once(
    result: torch.Tensor,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    bank: BankTensors,
) -> None:
    device = x.get_device()
    chosen = _specialisation(bank.spelling, x.dtype == torch.bfloat16, device)
    geometry, num_experts = bank.geometry, bank.num_experts
    tokens, top_k = expert_ids.shape
    teams = chosen.multiprocessors * (THREADS // 32 // TEAM_WARPS)
    work = cut(geometry, num_experts, tokens * top_k, chosen.slice, teams)
    a_row, b_row = (-(-size // 256) * 256 for size in (max(geometry.padded_sizes(0)[1], geometry.padded_sizes(1)[1]),
                                                       geometry.padded_sizes(2)[1]))  # fmt: skip
    a_size = 2 * work.a_slices * a_row
    parts = torch.empty(tokens * top_k * (a_size + work.b_slices * b_row), dtype=torch.float32, device=x.device)
    counters = arrival_counters(device, 2 + -(-geometry.padded_sizes(2)[1] // _COLUMNS) + _MOST)
    launch(
        chosen.kernel,
        device,
        (chosen.multiprocessors, 1, 1),
        THREADS,
        chosen.shared_bytes,
        x.data_ptr(),
        expert_ids.data_ptr(),
        expert_weights.data_ptr(),
        bank.trellis.data_ptr(),
        bank.scales.data_ptr(),
        bank.offsets.data_ptr(),
        bank.codebook_index.data_ptr(),
        chosen.numbers.data_ptr(),
        parts.data_ptr(),
        parts.data_ptr() + 4 * tokens * top_k * a_size,
        result.data_ptr(),
        counters.data_ptr(),
        np.int32(tokens),
        np.int32(top_k),
        np.int32(num_experts),
        np.int32(expert_ids.element_size()),
        np.int32(_WEIGHT_KINDS[expert_weights.dtype]),
        *pieces(geometry, work),
        overlap=chosen.overlap,
    )
