"""What one rank holds under tensor parallelism, module by module, and how many bytes that takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from espalier_format.errors import UsageError
from espalier_format.planning.module import ITEM_BYTES, PlannedModule, TensorSpec
from espalier_format.read_only import ReadOnlyDict
from espalier_format.runtimes.tensor_parallel import ModuleSlice

Parallelism = Literal["column", "row", "replicated"]
"""Whether the outputs of a module are split over the ranks, its inputs, or neither."""

_KINDS: Final[tuple[str, ...]] = get_args(Parallelism)
_COLUMN: Final = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"})
_ROW: Final = frozenset({"o_proj", "down_proj"})


def usual_parallelism(name: str) -> Parallelism:
    """Return how most runtimes split a module of this name: q, k, v, gate, up and head by column, o and down by row.

    What has another name is replicated: how linear attention, say, is split depends on its heads.
    """
    kind = name.rpartition(".")[2]
    return "column" if kind in _COLUMN else "row" if kind in _ROW else "replicated"


@dataclass(frozen=True, slots=True)
class RankModule:
    """The part of a module that one rank holds: a module of its own, with the names of the whole one."""

    module: PlannedModule
    slice: ModuleSlice

    @property
    def tensors(self) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
        """suh, svh and trellis, of the sizes that the rank holds."""
        name, part = self.module.name, self.slice
        return (
            TensorSpec(f"{name}.esp_suh", "F16", (part.padded_in,)),
            TensorSpec(f"{name}.esp_svh", "F16", (part.padded_out,)),
            TensorSpec(f"{name}.esp_trellis", "I16", part.trellis_shape(self.module.codebook)),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the three tensors."""
        return ITEM_BYTES * sum(math.prod(tensor.shape) for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The parts of all quantized modules that rank ``rank`` of ``world`` holds."""

    rank: int
    world: int
    modules: Mapping[str, RankModule]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of all quantized modules on this rank."""
        return sum(module.nbytes for module in self.modules.values())


def plan_rank(
    modules: Mapping[str, PlannedModule], rank: int, world: int, parallelism: Callable[[str], Parallelism]
) -> RankPlan:
    """Slice every module; see `Plan.rank`."""
    _check_integer("the rank", rank)
    _check_integer("the number of ranks", world)
    if world < 1:
        raise UsageError("the number of ranks must be positive", got=world)
    if not 0 <= rank < world:
        raise UsageError("no such rank", expected=f"0 to {world - 1}", got=rank)
    if not callable(parallelism):
        raise UsageError("parallelism must be a callable", got=type(parallelism).__name__)
    slices: dict[tuple[object, ...], ModuleSlice] = {}
    held: dict[str, RankModule] = {}
    for name, module in modules.items():
        kind = parallelism(name)
        _check_kind(name, kind)
        # Experts differ in their widths only.
        key = (kind, module.in_features, module.out_features, module.rotation_in, module.rotation_out)
        if key not in slices:
            slices[key] = _slice(module, kind, rank, world)
        held[name] = RankModule(module, slices[key])
    return RankPlan(rank, world, ReadOnlyDict(held))


def _check_integer(name: str, number: object) -> None:
    if not isinstance(number, int) or isinstance(number, bool):
        raise UsageError(f"{name} must be an integer", got=repr(number))


def _check_kind(name: str, kind: object) -> None:
    # A slip, or a function that returns nothing, must not mean "replicated".
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UsageError("no such parallelism", tensor=name, expected=" or ".join(_KINDS), got=repr(kind))


def _slice(module: PlannedModule, kind: Parallelism, rank: int, world: int) -> ModuleSlice:
    try:
        if kind == "column":
            return module.column_parallel(rank, world)
        return module.row_parallel(rank, world) if kind == "row" else module.part()
    except UsageError as error:
        raise UsageError(error.message, tensor=module.name) from error
