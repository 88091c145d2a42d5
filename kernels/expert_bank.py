"""The experts of one mixture-of-experts layer, packed, and their forward pass.

Every expert and projection has a codebook, and so a width, of its own. `ExpertBankLayout` says where everything lies,
`ExpertBankOperand` holds it, `expert_bank` computes with it: one call works on the CPU and on CUDA devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from espalier_format.codec.codebook import Codebook, get_codebook
from espalier_format.errors import DependencyError, DtypeError, NonFiniteScaleError, ShapeError, UsageError
from espalier_format.kernels.expert_bank_layout import PROJECTIONS, ExpertBankLayout

try:
    import torch
except ImportError as error:
    raise DependencyError("expert banks need torch: pip install torch") from error

from espalier_format.kernels import ops  # noqa: F401 - registers the operator
from espalier_format.kernels.expert_bank_fallback import expert_bank_fallback
from espalier_format.kernels.expert_bank_tensors import BankTensors, check_routing
from espalier_format.kernels.linear import FLOATS
from espalier_format.kernels.no_derivative import call_operator
from espalier_format.read_only import ReadOnlyDict

Expert = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor, Codebook | str]
"""One projection of one expert: a plain weight (out_features, in_features), or (trellis, suh, svh, codebook)."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertBankOperand:
    """All experts of one layer, ready to be computed with; checked when made.

    ``trellis`` is int16 (`layout.trellis_halfwords`,) and holds the tiles of all experts and projections as the
    checkpoint stores them, one after the other, none padded to the widest; ``scales`` is float16
    (`layout.scale_count`,) and holds suh and svh of each projection as (num_experts, in_p) and (num_experts, out_p);
    both are contiguous and on one device. ``plain`` has the weights, (out_features, in_features), of the experts stored
    plain, by (projection, expert).

    Two tables follow from the layout and cannot be given, so that they cannot contradict it: ``offsets``, int64
    (3, num_experts), the first halfword of each trellis, -1 for a plain expert; and ``codebook_index``, int32
    (3, num_experts), the place in ``layout.codebook_names``, -1 for a plain expert. They are made on the device of the
    trellis, so make the operand before a CUDA graph is captured.

    Raises DtypeError, ShapeError, and UsageError for tensors of several devices. No number of a tensor is looked at: it
    works on the "meta" device. Compared by identity.
    """

    layout: ExpertBankLayout
    trellis: torch.Tensor
    scales: torch.Tensor
    plain: Mapping[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    offsets: torch.Tensor = field(init=False)
    codebook_index: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        layout = self.layout
        for name, tensor, dtype, shape in (
            ("trellis", self.trellis, torch.int16, (layout.trellis_halfwords,)),
            ("scales", self.scales, torch.float16, (layout.scale_count,)),
        ):
            _check(name, tensor, dtype, shape)
            if not tensor.is_contiguous():
                raise ShapeError(f"{name} must be contiguous", expected=tuple(shape), got=f"strides {tensor.stride()}")
            if tensor.device != self.trellis.device:
                raise UsageError(f"{name} is on another device", expected=self.trellis.device, got=tensor.device)
        expected = {(name, expert) for name in PROJECTIONS for expert in layout.projections[name].plain_experts()}
        if set(self.plain) != expected:
            raise UsageError(
                "other experts are plain than the layout says", expected=len(expected), got=len(self.plain)
            )
        for (name, expert), weight in self.plain.items():
            projection = layout.projections[name]
            if weight.dtype not in FLOATS:
                raise DtypeError(f"{name} of expert {expert} is no float tensor", got=weight.dtype)
            if tuple(weight.shape) != (projection.out_features, projection.in_features):
                raise ShapeError(
                    f"{name} of expert {expert} does not fit the bank",
                    expected=(projection.out_features, projection.in_features),
                    got=tuple(weight.shape),
                )
            if weight.device != self.trellis.device:
                raise UsageError(f"{name} of expert {expert} is on another device", got=weight.device)
        object.__setattr__(self, "plain", ReadOnlyDict(self.plain))
        offsets, codebook_index = layout.tables(self.trellis.device)
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "codebook_index", codebook_index)

    @classmethod
    def from_experts(
        cls,
        projections: Mapping[str, Iterable[Expert]],
        *,
        hidden: int,
        intermediate: int,
        rotations: Mapping[str, tuple[int, int]],
        device: torch.device | str | None = None,
    ) -> Self:
        """Pack the tensors of single experts into a bank.

        ``projections`` maps "gate_proj", "up_proj" and "down_proj" to one `Expert` for each expert, in order: trellis
        int16 (in_p/16, out_p/16, W), suh float16 (in_p,), svh float16 (out_p,) and a codebook or its name, or a plain
        weight. ``rotations`` maps them to their (in, out) rotation blocks. ``device`` defaults to that of the first
        tensor. The tensors are copied; plain weights are only moved.

        Raises UsageError for other projections, CodebookError for an unknown name, NonFiniteScaleError, and what the
        class raises.
        """
        if set(projections) != set(PROJECTIONS) or set(rotations) != set(PROJECTIONS):
            raise UsageError("a bank has three projections", expected=PROJECTIONS, got=sorted(projections))
        experts = {name: list(projections[name]) for name in PROJECTIONS}
        layout = ExpertBankLayout.of(
            hidden,
            intermediate,
            {name: [_codebook_name(expert) for expert in experts[name]] for name in PROJECTIONS},
            rotations,
        )
        first = experts[PROJECTIONS[0]][0]
        where = device if device is not None else (first if isinstance(first, torch.Tensor) else first[0]).device
        buffers = layout.empty_buffers(where)
        plain = {}
        for name, items in experts.items():
            for number, expert in enumerate(items):
                if isinstance(expert, torch.Tensor):
                    plain[name, number] = expert.to(where)
                    continue
                views = layout.views(buffers, name, number)
                for kind, view, tensor in zip(("trellis", "suh", "svh"), views, expert[:3], strict=True):
                    _check(f"{kind} of {name} of expert {number}", tensor, view.dtype, tuple(view.shape))
                    view.copy_(tensor)
        if buffers["scales"].device.type != "meta" and not bool(torch.isfinite(buffers["scales"]).all()):
            raise NonFiniteScaleError("suh or svh of an expert holds an infinity or a NaN")
        return cls(layout, **buffers, plain=plain)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by a name that a torch module can register as a buffer.

        They are "trellis", "scales" and, for each plain expert, "plain_<projection>_<expert>"; the tables, which follow
        from the layout, are not among them. `with_tensors` takes them back.
        """
        own = {"trellis": self.trellis, "scales": self.scales}
        return own | {f"plain_{name}_{expert}": weight for (name, expert), weight in self.plain.items()}

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> ExpertBankOperand:
        """Return the same bank with other tensors in place of its own, e.g. what a module's buffers have become.

        Raises UsageError where the names are not those of `tensors`, and what the class raises.
        """
        if set(tensors) != set(self.tensors()):
            raise UsageError(
                "other tensors than those of the bank", expected=sorted(self.tensors()), got=sorted(tensors)
            )
        plain = {key: tensors[f"plain_{key[0]}_{key[1]}"] for key in self.plain}
        return ExpertBankOperand(self.layout, tensors["trellis"], tensors["scales"], plain)

    def to(self, device: torch.device | str) -> ExpertBankOperand:
        """Return the bank on that device; tensors that are there already are shared."""
        return self.with_tensors({name: tensor.to(device) for name, tensor in self.tensors().items()})

    @property
    def bank(self) -> BankTensors:
        """What the operator is given: all but the plain weights."""
        return BankTensors(self.trellis, self.scales, self.offsets, self.codebook_index, self.layout.spelling)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, those of the tables too."""
        held = (*self.tensors().values(), self.offsets, self.codebook_index)
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


def expert_bank(
    x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, operand: ExpertBankOperand
) -> torch.Tensor:
    """Return, for each token, the weighted sum of its experts: Σ w · down(silu(gate(x)) · up(x)).

    ``x`` is (tokens, hidden), float16, bfloat16 or float32; ``expert_ids`` int64 or int32 (tokens, k), where -1 stands
    for no expert, whose weight is not looked at; ``expert_weights`` (tokens, k), of one of the three dtypes; all on the
    operand's device. The result is (tokens, hidden) of the dtype and device of ``x``. An expert may stand several times
    with one token. Only routed experts are decoded.

    On a CUDA device, float16 and bfloat16 with no plain expert run in one kernel for up to 512 assignments of tokens to
    experts (more: in several launches): nothing is read back to the host, the result is the same in every run, and CUDA
    graphs may capture the call after one that was not captured. Weights are exact, rotated activations have the
    precision of float16 whatever their magnitude, sums and the activation are float32. Values are not looked at: scales
    that are not finite give results that are not, and a number that the bank does not have counts as no expert.
    Everything else is decoded a block of rows at a time and multiplied by torch, in the dtype of ``x``; memory beyond
    the result is bounded by that block and by tokens x intermediate.

    Raises DtypeError, ShapeError, UsageError (another device; from the torch path also an expert that the bank does not
    have), DependencyError on a CUDA device without cuda-core and, from the torch path, ScaleOverflowError. It is for
    inference: ``backward`` through the operator raises UsageError, on every device.
    """
    bank = operand.bank
    if len(operand.plain):  # not its truth: of an empty mapping behind a proxy, torch.compile takes that for true
        check_routing(x, expert_ids, expert_weights, bank)
        return expert_bank_fallback(x, expert_ids, expert_weights, bank, operand.plain)
    return call_operator(
        torch.ops.espalier_format.expert_bank, x, expert_ids, expert_weights, bank.trellis, bank.scales, bank.offsets,
        bank.codebook_index, bank.spelling,
    )  # fmt: skip


def _codebook_name(expert: Expert) -> str | None:
    if isinstance(expert, torch.Tensor):
        return None
    codebook = expert[3]
    return codebook.name if isinstance(codebook, Codebook) else get_codebook(codebook).name


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    if tensor.dtype != dtype:
        raise DtypeError(f"{name} has another dtype", expected=dtype, got=tensor.dtype)
    if tuple(tensor.shape) != tuple(shape):
        raise ShapeError(f"{name} has another shape", expected=tuple(shape), got=tuple(tensor.shape))
