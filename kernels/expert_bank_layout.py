"""Where the tensors of an expert bank lie in its packed buffers: a function of sizes, rotations and codebooks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Final

from espalier_format.codec.codebook import Codebook, get_codebook
from espalier_format.codec.rotation import padded
from espalier_format.codec.tile import TILE
from espalier_format.errors import ShapeError, UsageError
from espalier_format.read_only import ReadOnlyDict

if TYPE_CHECKING:
    import torch

PROJECTIONS: Final = ("gate_proj", "up_proj", "down_proj")
"""The projections of a bank, in the order of its tables."""

ALIGNMENT: Final = 64
"""Halfwords to which the trellis of an expert is aligned: 128 bytes, a cache line of a GPU."""


def pack_trellises(sizes: Mapping[str, Sequence[int]]) -> tuple[Mapping[str, tuple[int, ...]], int]:
    """Return where each expert's trellis begins in one buffer for all, and the length of the buffer, in halfwords.

    ``sizes`` has, by projection, the halfwords of each expert's trellis, 0 for a plain one. They lie one after the
    other in that order, each aligned to `ALIGNMENT`; a plain expert takes no room, and its place is -1. What is
    planned and what is computed with are both packed by this function.
    """
    found: dict[str, tuple[int, ...]] = {}
    position = 0
    for name, experts in sizes.items():
        starts = []
        for size in experts:
            starts.append(position if size else -1)
            position += aligned_size(size)
        found[name] = tuple(starts)
    return ReadOnlyDict(found), position


def aligned_size(size: int) -> int:
    """Return the halfwords that a trellis of ``size`` halfwords takes in the buffer."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class ProjectionLayout:
    """One projection of all experts: its sizes, its rotation blocks, and each expert's codebook.

    ``codebooks`` has one name for each expert, None for one that is stored plain (`schema.Projection.expert_codebooks`
    gives it). Raises CodebookError for unknown names, UsageError for unknown rotation blocks, and ShapeError for sizes
    below 1.
    """

    in_features: int
    out_features: int
    rotation_in: int
    rotation_out: int
    codebooks: tuple[str | None, ...]

    def __post_init__(self) -> None:
        if self.in_features < 1 or self.out_features < 1:
            raise ShapeError("an expert has no weights", got=(self.out_features, self.in_features))
        padded(1, self.rotation_in), padded(1, self.rotation_out)  # refuses unknown blocks
        for name in set(self.codebooks) - {None}:
            get_codebook(str(name))

    @cached_property
    def padded_in(self) -> int:
        """in_features rounded up as spec/rotation.md §2 says."""
        return padded(self.in_features, self.rotation_in)

    @cached_property
    def padded_out(self) -> int:
        """out_features rounded up as spec/rotation.md §2 says."""
        return padded(self.out_features, self.rotation_out)

    def codebook(self, expert: int) -> Codebook | None:
        """Return the codebook of an expert, None where it is stored plain."""
        name = self.codebooks[expert]
        return None if name is None else get_codebook(name)

    def trellis_shape(self, expert: int) -> tuple[int, int, int]:
        """Return (in_p/16, out_p/16, W) of an expert; W is 0 for a plain one."""
        codebook = self.codebook(expert)
        return (self.padded_in // TILE, self.padded_out // TILE, codebook.halfwords_per_tile if codebook else 0)

    def plain_experts(self) -> tuple[int, ...]:
        """Return the experts that are stored plain."""
        return tuple(number for number, name in enumerate(self.codebooks) if name is None)


@dataclass(frozen=True)
class ExpertBankLayout:
    """The layout of a bank: gate_proj and up_proj from hidden to intermediate, down_proj back.

    Raises UsageError for other projections, ShapeError for sizes that contradict each other and for a different number
    of experts.
    """

    projections: Mapping[str, ProjectionLayout]

    def __post_init__(self) -> None:
        if set(self.projections) != set(PROJECTIONS):
            raise UsageError("a bank has three projections", expected=PROJECTIONS, got=sorted(self.projections))
        gate, up, down = (self.projections[name] for name in PROJECTIONS)
        sizes = (gate.in_features, gate.out_features)
        for name, got in (
            ("up_proj", (up.in_features, up.out_features)),
            ("down_proj", (down.out_features, down.in_features)),
        ):
            if got != sizes:
                raise ShapeError(f"{name} does not fit gate_proj: (hidden, intermediate)", expected=sizes, got=got)
        counts = [len(projection.codebooks) for projection in (gate, up, down)]
        if counts[0] < 1 or len(set(counts)) != 1:
            raise ShapeError("the projections need as many experts each, and at least one", got=counts)
        object.__setattr__(self, "projections", ReadOnlyDict({name: self.projections[name] for name in PROJECTIONS}))

    @classmethod
    def of(
        cls,
        hidden: int,
        intermediate: int,
        codebooks: Mapping[str, Sequence[str | None]],
        rotations: Mapping[str, tuple[int, int]],
    ) -> ExpertBankLayout:
        """Return the layout of a bank from its sizes, and by projection the experts' codebooks and (in, out) blocks."""
        if set(codebooks) != set(PROJECTIONS) or set(rotations) != set(PROJECTIONS):
            raise UsageError("a bank has three projections", expected=PROJECTIONS, got=sorted(codebooks))
        sizes = dict.fromkeys(PROJECTIONS, (hidden, intermediate)) | {"down_proj": (intermediate, hidden)}
        return cls(
            {
                name: ProjectionLayout(*sizes[name], *rotations[name], codebooks=tuple(codebooks[name]))
                for name in PROJECTIONS
            }
        )

    @property
    def hidden(self) -> int:
        """Features of a token."""
        return self.projections["gate_proj"].in_features

    @property
    def intermediate(self) -> int:
        """Features between the projections."""
        return self.projections["gate_proj"].out_features

    @property
    def num_experts(self) -> int:
        """Experts of the bank, plain ones too."""
        return len(self.projections["gate_proj"].codebooks)

    @cached_property
    def codebook_names(self) -> tuple[str, ...]:
        """The codebooks that occur, sorted."""
        return tuple(
            sorted({name for each in self.projections.values() for name in each.codebooks if name is not None})
        )

    @cached_property
    def _packed(self) -> tuple[Mapping[str, tuple[int, ...]], int]:
        return pack_trellises(
            {
                name: [math.prod(projection.trellis_shape(expert)) for expert in range(self.num_experts)]
                for name, projection in self.projections.items()
            }
        )

    @property
    def offsets(self) -> Mapping[str, tuple[int, ...]]:
        """By projection, the first halfword of each expert's trellis, -1 for a plain one; multiples of 64."""
        return self._packed[0]

    @property
    def trellis_halfwords(self) -> int:
        """Length of the packed trellis."""
        return self._packed[1]

    @cached_property
    def scale_offsets(self) -> Mapping[str, tuple[int, int]]:
        """By projection, where its suh (num_experts, in_p) and its svh (num_experts, out_p) begin."""
        geometry = BankGeometry.read(self.spelling)
        places = {name: geometry.scale_offsets(number, self.num_experts) for number, name in enumerate(PROJECTIONS)}
        return ReadOnlyDict(places)

    @property
    def scale_count(self) -> int:
        """Length of the packed scales."""
        return self.num_experts * sum(each.padded_in + each.padded_out for each in self.projections.values())

    def empty_buffers(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        """Return "trellis" and "scales" of `ExpertBankOperand`, all zero.

        `views` gives the parts to copy experts into.
        """
        import torch  # noqa: PLC0415 - the layout alone needs no torch

        return {
            "trellis": torch.zeros(self.trellis_halfwords, dtype=torch.int16, device=device),
            "scales": torch.zeros(self.scale_count, dtype=torch.float16, device=device),
        }

    def tables(self, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``offsets`` and ``codebook_index`` of `ExpertBankOperand`: copies of what the layout says."""
        import torch  # noqa: PLC0415 - the layout alone needs no torch

        index = {name: number for number, name in enumerate(self.codebook_names)}
        rows = [
            [-1 if book is None else index[book] for book in projection.codebooks]
            for projection in self.projections.values()
        ]
        starts = [list(self.offsets[name]) for name in PROJECTIONS]
        return (
            torch.tensor(starts, dtype=torch.int64, device=device),
            torch.tensor(rows, dtype=torch.int32, device=device),
        )

    def views(
        self, buffers: Mapping[str, torch.Tensor], projection: str, expert: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return an expert's trellis (in_p/16, out_p/16, W), suh (in_p,) and svh (out_p,) as views of the buffers."""
        layout = self.projections[projection]
        shape = layout.trellis_shape(expert)
        size = shape[0] * shape[1] * shape[2]
        start = self.offsets[projection][expert]
        if start < 0:
            raise UsageError(f"{projection} of expert {expert} is stored plain: it has no trellis")
        suh, svh = self.scale_offsets[projection]
        suh, svh = suh + expert * layout.padded_in, svh + expert * layout.padded_out
        return (
            buffers["trellis"][start : start + size].view(shape),
            buffers["scales"][suh : suh + layout.padded_in],
            buffers["scales"][svh : svh + layout.padded_out],
        )

    @cached_property
    def spelling(self) -> str:
        """The sizes, blocks and codebooks as one string, which the torch op takes; `from_spelling` reads it."""
        gate, up, down = self.projections.values()
        blocks = [block for each in (gate, up, down) for block in (each.rotation_in, each.rotation_out)]
        return f"{self.hidden},{self.intermediate},{','.join(map(str, blocks))};{','.join(self.codebook_names)}"


@dataclass(frozen=True)
class BankGeometry:
    """What a kernel is specialised by: the sizes and rotation blocks of a bank, and the codebooks that occur in it."""

    hidden: int
    intermediate: int
    blocks: tuple[int, int, int, int, int, int]
    """Rotation blocks in and out of gate_proj, up_proj and down_proj."""
    codebooks: tuple[Codebook, ...]

    def sizes(self, projection: int) -> tuple[int, int]:
        """Return (in_features, out_features) of gate_proj (0), up_proj (1) or down_proj (2)."""
        return (self.intermediate, self.hidden) if projection == 2 else (self.hidden, self.intermediate)

    def rotation(self, projection: int) -> tuple[int, int]:
        """Return the (in, out) rotation blocks of a projection."""
        return self.blocks[2 * projection], self.blocks[2 * projection + 1]

    def padded_sizes(self, projection: int) -> tuple[int, int]:
        """Return (in_p, out_p) of a projection."""
        size_in, size_out = self.sizes(projection)
        return padded(size_in, self.rotation(projection)[0]), padded(size_out, self.rotation(projection)[1])

    def scale_offsets(self, projection: int, num_experts: int) -> tuple[int, int]:
        """Return where suh (num_experts, in_p) and svh (num_experts, out_p) of a projection begin in the scales."""
        start = num_experts * sum(sum(self.padded_sizes(before)) for before in range(projection))
        return start, start + num_experts * self.padded_sizes(projection)[0]

    def trellis_bounds(self, num_experts: int) -> tuple[int, int]:
        """Return the least and the largest length of the packed trellis if no expert is plain, in halfwords."""
        least = largest = 0
        for projection in range(len(PROJECTIONS)):
            tiles = math.prod(size // TILE for size in self.padded_sizes(projection))
            sizes = [aligned_size(tiles * book.halfwords_per_tile) for book in self.codebooks]
            least += num_experts * min(sizes, default=0)
            largest += num_experts * max(sizes, default=0)
        return least, largest

    @staticmethod
    @lru_cache(maxsize=1024)
    def read(spelling: str) -> BankGeometry:
        """Return what `ExpertBankLayout.spelling` says. Raises UsageError for other strings."""
        try:
            numbers, names = spelling.split(";")
            hidden, intermediate, *blocks = (int(number) for number in numbers.split(","))
            first, second, third, fourth, fifth, sixth = blocks
        except ValueError as error:
            raise UsageError("this is not how a bank is spelled", got=spelling) from error
        books = tuple(get_codebook(name) for name in names.split(",") if name)
        return BankGeometry(hidden, intermediate, (first, second, third, fourth, fifth, sixth), books)
