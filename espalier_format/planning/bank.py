"""The experts of one layer, each with its own width, as a runtime allocates them (spec/config.md §5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from espalier_format.planning.module import PlannedModule


@dataclass(frozen=True, slots=True)
class PlannedProjection:
    """One projection of all experts of a bank; all have the same sizes and rotation.

    ``experts`` has a module for each expert, None where the expert is plain: then the checkpoint holds
    ``<bank>.<expert>.<name>.weight`` of shape (out_features, in_features), in a dtype that the config does not state.

    >>> from espalier_format.codec.codebook import get_codebook
    >>> narrow, wide = (
    ...     PlannedModule(f"experts.{number}.up_proj", get_codebook(name), 32, 64, 32, 32)
    ...     for number, name in ((0, "e2m1@1"), (2, "int5@3"))
    ... )
    >>> up = PlannedProjection("up_proj", 32, 64, 32, 32, (narrow, None, wide))
    >>> up.trellis_offsets, up.plain_experts, up.codebooks
    ((0, 128, 128, 512), (1,), ('e2m1@1', 'int5@3'))
    """

    name: str
    in_features: int
    out_features: int
    rotation_in: int
    rotation_out: int
    experts: tuple[PlannedModule | None, ...]

    @property
    def codebooks(self) -> tuple[str, ...]:
        """Names of the codebooks that occur, in the order of the experts that first use them."""
        return tuple(dict.fromkeys(expert.codebook.name for expert in self.experts if expert is not None))

    @property
    def plain_experts(self) -> tuple[int, ...]:
        """Numbers of the experts that are plain."""
        return tuple(number for number, expert in enumerate(self.experts) if expert is None)

    @property
    def trellis_offsets(self) -> tuple[int, ...]:
        """Where each expert begins, in I16 elements, if all trellises lie one after the other; E + 1 numbers.

        A plain expert takes no room; the last number is the size of the whole buffer.
        """
        sizes = (0 if expert is None else prod(expert.trellis_shape) for expert in self.experts)
        return tuple(accumulate(sizes, initial=0))

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of all quantized experts."""
        return sum(expert.nbytes for expert in self.experts if expert is not None)


@dataclass(frozen=True, slots=True)
class PlannedBank:
    """All experts of one layer."""

    name: str
    num_experts: int
    projections: Mapping[str, PlannedProjection]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of all quantized experts."""
        return sum(projection.nbytes for projection in self.projections.values())
