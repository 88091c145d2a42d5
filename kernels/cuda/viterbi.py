"""The encoder's back end "cuda": the trellis search of `espalier_format.encoder`, on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from espalier_format.codec.codebook import CODEBOOKS, STATES, Codebook
from espalier_format.codec.tile import RING
from espalier_format.encoder.branch_cost import BranchCost, branch_cost
from espalier_format.encoder.effort import Effort
from espalier_format.errors import DtypeError, ShapeError, UsageError
from espalier_format.kernels.cuda.compiler import Variant
from espalier_format.kernels.cuda.launch import launch
from espalier_format.kernels.cuda.loading import architecture, load_kernel
from espalier_format.kernels.cuda.once import once

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cuda.core import Kernel
    from numpy.typing import NDArray

TABLE, FLOAT, WIDE = 0, 1, 2
"""How the kernel finds branch costs; ``viterbi.cu`` says more."""

_SEARCHERS: Final = 512
_WARP: Final = 32
_SETS: Final = 2
_MOST_LEVELS: Final = 64
_LEVELS_OF_TWO_STEPS: Final = 16
_NEXT_TABLE: Final = 65536
_SPACING: Final = {1: 8, 2: 4, 3: 2, 4: 2}
"""Steps between checkpoints, by the larger number of bits of a step; 1 for more bits."""


@dataclass(frozen=True, slots=True)
class SearchForm:
    """A specialisation of ``viterbi.cu`` for the branch costs of a codebook. All find the same states."""

    even_bits: int
    odd_bits: int
    cost: int
    """`TABLE`, `FLOAT` or `WIDE`."""
    levels: int
    rings: int
    """Rings that a block searches at once."""
    two_steps: bool
    """Whether metrics stay in registers at every other step."""
    spacing: int
    """Steps between checkpoints."""

    @classmethod
    def all_of(cls, cost: BranchCost) -> tuple[SearchForm, ...]:
        """List the forms for a codebook's branch costs: the fastest first, and each takes less memory than the last."""
        even_bits, odd_bits = int(cost.bits[0]), int(cost.bits[1])
        levels = len(np.unique(cost.codes))
        spacing = _SPACING.get(max(even_bits, odd_bits), 1)
        if cost.wide:
            return (cls(even_bits, odd_bits, WIDE, 0, 1, False, spacing),)
        computed = cls(even_bits, odd_bits, FLOAT, 0, 2, False, spacing)
        if levels > _MOST_LEVELS:
            return (computed,)
        two_steps = even_bits == odd_bits == 2 and levels <= _LEVELS_OF_TWO_STEPS
        rings = 4 if even_bits + odd_bits > 4 else 2
        fastest = cls(even_bits, odd_bits, TABLE, levels, rings, two_steps, spacing)
        return tuple(dict.fromkeys((fastest, replace(fastest, rings=2, two_steps=False), computed)))

    @property
    def macros(self) -> Mapping[str, int | str]:
        """What ``viterbi.cu`` is compiled with."""
        return {
            "EVEN_BITS": self.even_bits,
            "ODD_BITS": self.odd_bits,
            "COST": self.cost,
            "LEVELS": self.levels,
            "RINGS": self.rings,
            "TWO_STEPS": int(self.two_steps),
            "SPACING": self.spacing,
        }

    @property
    def words(self) -> int:
        """Words of a metric: two rings share one, unless costs are wide."""
        return (self.rings + 1) // 2

    @property
    def threads(self) -> int:
        """Threads of a block: those that search, and a warp for each ring that traces paths back."""
        return _SEARCHERS + self.rings * _WARP

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, as ``viterbi_layout.cuh`` lays it out."""
        table = -(-self.levels // 16) * 16 * 256 * self.words + (_NEXT_TABLE if self.two_steps else 0)
        groups = STATES >> self.even_bits
        codes = 0
        if self.cost == WIDE:
            shares = max(2 * _SEARCHERS // groups, 1)
            metrics = 2 * 4 * (groups >> self.even_bits) * ((1 << self.even_bits) + 4 * shares)
            codes = 2 * STATES + shares * (_WARP // shares * 4)
        elif max(self.even_bits, self.odd_bits) == 1:
            metrics = 6 * (STATES >> 1)
        else:
            metrics = 4 * self.words * (groups + (STATES >> self.odd_bits))
        rings = _SETS * self.rings * (2 * RING + 4)
        alignment = 3072 if self.two_steps else 0
        return table + metrics + codes + 2 * self.words * 16 * 4 + rings + 4 * 8 + 8 + alignment

    @property
    def checkpoint_words(self) -> int:
        """Words of global memory that a block needs."""
        groups = STATES >> (self.even_bits if self.spacing == 1 else self.odd_bits)
        return _SETS * (RING // self.spacing - 1) * groups * self.words


@cache
def search_forms(codebook: Codebook) -> tuple[SearchForm, ...]:
    """List the forms of a codebook, see `SearchForm.all_of`."""
    return SearchForm.all_of(branch_cost(codebook))


def form_within(codebook: Codebook, shared_bytes: int, device: object) -> SearchForm:
    """Return the fastest form of a codebook whose blocks take no more than ``shared_bytes`` of shared memory.

    Raises UsageError where there is none: it names ``device``, what is needed, and what to do.
    """
    forms = search_forms(codebook)
    for form in forms:
        if form.shared_bytes <= shared_bytes:
            return form
    raise UsageError(
        f"{device} has too little shared memory to encode {codebook.name}: "
        "encode it on the CPU, with the back end numba (--backend numba)",
        expected=f"{forms[-1].shared_bytes:,} bytes for each block",
        got=f"{shared_bytes:,}",
    )


def form_on(codebook: Codebook, device: int) -> SearchForm:
    """Return the form in which a CUDA device encodes a codebook. Compiles nothing.

    Raises UsageError for a device that is too old, or has too little shared memory for every form.
    """
    architecture(device)
    properties = torch.cuda.get_device_properties(device)
    # What a block may ask for beyond the default is missing from torch's own annotations.
    return form_within(codebook, int(getattr(properties, "shared_memory_per_block_optin")), f"cuda:{device}")  # noqa: B009


def variants() -> Iterator[Variant]:
    """List how the kernel is compiled: every form of every codebook."""
    for form in dict.fromkeys(form for codebook in CODEBOOKS.values() for form in search_forms(codebook)):
        yield Variant("viterbi", ("viterbi",), form.macros)


def search(targets: NDArray[np.int16], cost: BranchCost, effort: Effort, threads: int) -> NDArray[np.uint16]:
    """Find the states of rings: an encoder `Backend` on torch's current CUDA device.

    ``threads`` is not used. Device memory: 512 bytes a ring for targets, as much for states, and up to 16 MiB for every
    multiprocessor.
    """
    del threads
    if not len(targets):
        return np.empty(targets.shape, np.uint16)
    device = torch.device("cuda", torch.cuda.current_device())
    found = search_on_device(torch.from_numpy(np.ascontiguousarray(targets)).to(device), cost, effort)
    states: NDArray[np.uint16] = found.cpu().numpy().view(np.uint16)
    return states


def search_on_device(targets: torch.Tensor, cost: BranchCost, effort: Effort) -> torch.Tensor:
    """Find the states of rings that are on a device, without waiting for it.

    ``targets`` is int16 (n, 256), contiguous, within the range of `BranchCost.fixed_point`; the result has the same
    shape and dtype and holds the 16 bits of every state. The states are those of `numpy_backend`.

    The form is the fastest that the device has the shared memory for. Raises DtypeError, ShapeError, UsageError for
    another device than CUDA, or one that is too old or has too little shared memory for every form of the codebook, and
    DependencyError without cuda-core. Values are not looked at.
    """
    _check(targets)
    states = torch.empty_like(targets)
    rings = len(targets)
    if not rings:
        return states
    device = targets.get_device()
    form = form_on(cost.codebook, device)
    kernel, codes, levels, level_codes = _prepared(cost, form, device)
    blocks = min(-(-rings // form.rings), torch.cuda.get_device_properties(device).multi_processor_count)
    checkpoints = torch.empty(blocks * form.checkpoint_words, dtype=torch.int32, device=targets.device)
    launch(
        kernel,
        device,
        (blocks, 1, 1),
        form.threads,
        form.shared_bytes,
        targets.data_ptr(),
        states.data_ptr(),
        codes.data_ptr(),
        levels.data_ptr(),
        level_codes.data_ptr(),
        checkpoints.data_ptr(),
        np.int32(rings),
        np.int32(effort.passes),
        np.int32(effort.reach(RING)),
        np.int32(cost.limit),
        np.int32(cost.shift),
        np.uint32(cost.largest),
        np.uint32(_unreachable(cost)),
    )
    return states


def _check(targets: torch.Tensor) -> None:
    """Raise unless the kernel can read the targets: it knows neither their dtype nor their shape."""
    if targets.dtype != torch.int16:
        raise DtypeError("targets must be fixed-point numbers", expected="int16", got=targets.dtype)
    if targets.dim() != 2 or targets.shape[1] != RING:
        raise ShapeError("targets must be rings", expected=f"(n, {RING})", got=tuple(targets.shape))
    if not targets.is_contiguous():
        raise ShapeError("targets must be contiguous", got=f"strides {tuple(targets.stride())}")
    if targets.device.type != "cuda":
        raise UsageError("targets must be on a CUDA device", expected="cuda", got=targets.device)


# Once and without a limit: a captured graph holds addresses of these tables, so that none may ever be freed.
# There are no more of them than codebooks, of at most 256 KiB on each device.
@once
def _prepared(
    cost: BranchCost, form: SearchForm, device: int
) -> tuple[Kernel, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the kernel for branch costs, and their codes on the device: of all states, as levels, and of levels."""
    kernel = load_kernel("viterbi", "viterbi", form.macros, device)
    level_codes, levels = np.unique(cost.codes, return_inverse=True)
    place = torch.device("cuda", device)
    return (
        kernel,
        torch.from_numpy(cost.codes.copy()).to(place),
        torch.from_numpy(levels.astype(np.uint8)).to(place),  # of use only where there are few
        torch.from_numpy(level_codes).to(place),
    )


def _unreachable(cost: BranchCost) -> int:
    """Return a metric for "no path from the start state": the smallest that is larger than any path's when they meet.

    The result is that of the larger `BranchCost.unreachable`, but sums stay smaller.
    """
    return cost.mixing_steps * cost.largest + 1
