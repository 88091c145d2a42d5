"""The experts of one layer, each with its own width, as a runtime allocates them (spec/config.md §5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from math import prod

from espalier_format.kernels.expert_bank_layout import PROJECTIONS, pack_trellises
from espalier_format.planning.module import PlannedModule


@dataclass(frozen=True, slots=True)
class PlannedProjection:
    """One projection of all experts of a bank; all have the same sizes and rotation.

    ``experts`` has a module for each expert, None where the expert is plain: then the checkpoint holds
    ``<bank>.<expert>.<name>.weight`` of shape (out_features, in_features), in a dtype that the config does not state.

    >>> from espalier_format.codec.codebook import get_codebook
    >>> sizes = {"in_features": 32, "out_features": 64, "rotation_in": 32, "rotation_out": 32}
    >>> narrow, wide = (
    ...     PlannedModule(f"experts.{number}.up_proj", get_codebook(name), **sizes)
    ...     for number, name in ((0, "e2m1@1"), (2, "int5@3"))
    ... )
    >>> up = PlannedProjection("up_proj", **sizes, experts=(narrow, None, wide))
    >>> up.plain_experts, up.codebooks
    ((1,), ('e2m1@1', 'int5@3'))
    """

    name: str
    _: KW_ONLY
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
    def nbytes(self) -> int:
        """Bytes of the tensors of all quantized experts."""
        return sum(expert.nbytes for expert in self.experts if expert is not None)


@dataclass(frozen=True, slots=True)
class PlannedBank:
    """All experts of one layer.

    >>> from espalier_format.codec.codebook import get_codebook
    >>> sizes = {"in_features": 48, "out_features": 48, "rotation_in": 0, "rotation_out": 0}
    >>> narrow, wide = (
    ...     PlannedModule(f"experts.{number}.up_proj", get_codebook(name), **sizes)
    ...     for number, name in ((0, "e2m1@1"), (2, "int5@3"))
    ... )
    >>> up = PlannedProjection("up_proj", **sizes, experts=(narrow, None, wide))
    >>> bank = PlannedBank("experts", 3, {"up_proj": up})
    >>> bank.trellis_offsets["up_proj"], bank.trellis_halfwords
    ((0, -1, 192), 640)
    """

    name: str
    num_experts: int
    projections: Mapping[str, PlannedProjection]

    @property
    def trellis_offsets(self) -> Mapping[str, tuple[int, ...]]:
        """Where each expert's trellis begins in one buffer for the whole bank, in I16 elements, by projection.

        The buffer is that of `espalier_format.kernels.expert_bank.ExpertBankOperand`, where a bank has its three
        projections: first all experts of gate_proj, then of up_proj, then of down_proj. Others follow, in the order of
        the config. Each expert begins at a multiple of 64 elements; -1 stands for a plain one, which takes no room.
        """
        return self._packed()[0]

    @property
    def trellis_halfwords(self) -> int:
        """Length of that buffer, in I16 elements."""
        return self._packed()[1]

    def _packed(self) -> tuple[Mapping[str, tuple[int, ...]], int]:
        known = [name for name in PROJECTIONS if name in self.projections]
        order = dict.fromkeys([*known, *self.projections])
        return pack_trellises(
            {
                name: [0 if expert is None else prod(expert.trellis_shape) for expert in self.projections[name].experts]
                for name in order
            }
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of all quantized experts."""
        return sum(projection.nbytes for projection in self.projections.values())
