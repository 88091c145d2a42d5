"""Which tiles and scales of a quantized module one rank holds, under tensor parallelism.

Files stay whole: a rank reads its part of each tensor. A trellis is made of 16x16 tiles that are coded independently of
each other, and a rotation mixes the features of one block only. So a module can be cut between blocks (between tiles,
where a side is not rotated), and nowhere else. suh follows a cut of the input side, svh one of the output side.

A rank with a slice of the inputs gives a partial result. Its output rotation is linear, so that the sum over the ranks
is the result of the whole module. A bias belongs into that sum once.

Pure arithmetic: no tensors, no host, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol, Self

from espalier_format.codec.codebook import Codebook
from espalier_format.codec.rotation import padded
from espalier_format.codec.tile import TILE
from espalier_format.errors import ShapeError, UsageError

__all__ = ["FeatureRange", "ModuleSlice", "Sizes", "equal_share", "join_ranges", "slice_module"]

_SIDES: Final = ("in_features", "out_features")


class Sizes(Protocol):
    """What must be known of a module or of the experts of a projection: `schema.config.ModuleSpec` has it."""

    @property
    def in_features(self) -> int:
        """Size of the input side, without padding."""

    @property
    def out_features(self) -> int:
        """Size of the output side, without padding."""


@dataclass(frozen=True, slots=True, order=True)
class FeatureRange:
    """Features ``start`` to ``stop`` - 1 of one side, counted without padding."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of features."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ModuleSlice:
    """The part of a module that one rank holds: a run of inputs, and one or more runs of outputs, in ascending order.

    It is a module of its own, of ``in_features`` and ``out_features``, with the rotation blocks of the whole one: made
    of the tiles in ``trellis_rows`` and ``trellis_columns`` and of the scales in ``suh`` and ``svh``. Each of the four
    is a tuple of (first, end) in the stored tensor, to be put together in this order. Made by `slice_module`.
    """

    inputs: FeatureRange
    outputs: tuple[FeatureRange, ...]
    rotation_in: int
    rotation_out: int

    @property
    def in_features(self) -> int:
        """Inputs that the rank holds, without padding."""
        return self.inputs.size

    @property
    def out_features(self) -> int:
        """Outputs that the rank holds, without padding."""
        return sum(each.size for each in self.outputs)

    @property
    def padded_in(self) -> int:
        """Size of the rank's suh."""
        return padded(self.in_features, self.rotation_in)

    @property
    def padded_out(self) -> int:
        """Size of the rank's svh."""
        return padded(self.out_features, self.rotation_out)

    @property
    def suh(self) -> tuple[tuple[int, int], ...]:
        """Entries of the stored suh."""
        return (_stored(self.inputs, self.rotation_in),)

    @property
    def svh(self) -> tuple[tuple[int, int], ...]:
        """Entries of the stored svh."""
        return tuple(_stored(each, self.rotation_out) for each in self.outputs)

    @property
    def trellis_rows(self) -> tuple[tuple[int, int], ...]:
        """Tiles along the first dimension of the stored trellis."""
        return tuple((first // TILE, end // TILE) for first, end in self.suh)

    @property
    def trellis_columns(self) -> tuple[tuple[int, int], ...]:
        """Tiles along the second dimension of the stored trellis."""
        return tuple((first // TILE, end // TILE) for first, end in self.svh)

    def trellis_shape(self, codebook: Codebook) -> tuple[int, int, int]:
        """Return the shape of the rank's trellis: (padded_in/16, padded_out/16, W)."""
        return self.padded_in // TILE, self.padded_out // TILE, codebook.halfwords_per_tile


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of a whole module, for checks."""

    name: str
    size: int
    block: int

    @classmethod
    def of(cls, sizes: Sizes, rotation: tuple[int, int], side: int) -> Self:
        return cls(_SIDES[side], (sizes.in_features, sizes.out_features)[side], rotation[side])

    def check(self, part: FeatureRange) -> None:
        if not 0 <= part.start < part.stop <= self.size:
            raise ShapeError(
                f"{self.name} has no such part", expected=f"within 0 to {self.size}", got=f"{part.start} to {part.stop}"
            )
        step = self.block or TILE
        unit = f"rotation block of {self.block}" if self.block else "tile of 16"
        for border in (part.start, part.stop):
            if border % step and border != self.size:
                raise UsageError(
                    f"a rank would hold {part.start} to {part.stop} of the {self.size} {self.name}, "
                    f"and {border} is within a {unit}"
                )


def equal_share(size: int, rank: int, world: int) -> FeatureRange:
    """Return the features of one rank when all ranks hold as many.

    Raises UsageError for a rank that is not one of ``world``, and if ``world`` does not divide ``size``.
    """
    if world < 1 or not 0 <= rank < world:
        raise UsageError("no such rank", expected=f"0 to {world - 1}", got=rank)
    if size % world:
        raise UsageError(f"{size} features cannot be split equally over {world} ranks")
    share = size // world
    return FeatureRange(rank * share, (rank + 1) * share)


def join_ranges(ranges: Iterable[FeatureRange]) -> tuple[FeatureRange, ...]:
    """Return the same features in as few ranges as possible; raise UsageError unless they ascend without overlap."""
    joined: list[FeatureRange] = []
    for each in ranges:
        if joined and each.start < joined[-1].stop:
            raise UsageError("ranges must ascend and not overlap", got=f"{joined[-1].stop} and then {each.start}")
        if joined and each.start == joined[-1].stop:
            joined[-1] = FeatureRange(joined[-1].start, each.stop)
        else:
            joined.append(each)
    return tuple(joined)


def slice_module(
    sizes: Sizes,
    rotation: tuple[int, int],
    inputs: FeatureRange | None = None,
    outputs: Iterable[FeatureRange] | None = None,
) -> ModuleSlice:
    """Return the part of a module with these inputs and outputs; None means all of a side.

    ``rotation`` is the pair of (in, out) blocks. Every border must lie between two rotation blocks, or two tiles where
    the side is not rotated, or at the true end of the side, whose padding then comes along.

    Raises UsageError, which says the reason in words, for a border within a block, and ShapeError for a range that is
    empty or beyond the module.
    """
    in_side, out_side = _Side.of(sizes, rotation, 0), _Side.of(sizes, rotation, 1)
    columns = inputs if inputs is not None else FeatureRange(0, in_side.size)
    rows = join_ranges(outputs) if outputs is not None else (FeatureRange(0, out_side.size),)
    if not rows:
        raise ShapeError("a slice needs outputs")
    in_side.check(columns)
    for each in rows:
        out_side.check(each)
    return ModuleSlice(columns, rows, *rotation)


def _stored(part: FeatureRange, block: int) -> tuple[int, int]:
    return part.start, part.start + padded(part.size, block)
