"""What the operator of an expert bank is given, and how it is checked: without looking at a number."""

from __future__ import annotations

from dataclasses import dataclass

from espalier_format.errors import DtypeError, ShapeError, UsageError
from espalier_format.kernels.expert_bank_layout import ALIGNMENT, BankGeometry
from espalier_format.kernels.linear import FLOATS

# linear first: it says what to install where torch is missing.
import torch  # isort: skip


@dataclass(frozen=True, slots=True, eq=False)
class BankTensors:
    """The tensors of a bank and how they are to be read: those of `ExpertBankOperand`, less its plain weights.

    Not checked when made. Compared by identity.
    """

    trellis: torch.Tensor
    """int16 (halfwords,), the tiles of all experts and projections."""
    scales: torch.Tensor
    """float16, suh and svh of each projection, of all experts."""
    offsets: torch.Tensor
    """int64 (3, num_experts), the first halfword of each trellis."""
    codebook_index: torch.Tensor
    """int32 (3, num_experts), the place of the codebook in `BankGeometry.codebooks`."""
    spelling: str
    """`ExpertBankLayout.spelling`."""

    @property
    def geometry(self) -> BankGeometry:
        """Sizes, rotations and codebooks; read from the spelling once in a process."""
        return BankGeometry.read(self.spelling)

    @property
    def num_experts(self) -> int:
        """Experts of each projection."""
        return self.offsets.shape[1]


def check_bank(bank: BankTensors) -> None:
    """Raise DtypeError, ShapeError or UsageError unless the tensors can be a bank without plain experts.

    Values are not read, as that would wait for the device: that ``offsets`` and ``codebook_index`` are those of a
    layout is up to `ExpertBankOperand`, which makes them.
    """
    geometry, trellis = bank.geometry, bank.trellis
    num_experts = bank.offsets.shape[-1] if bank.offsets.dim() else 0
    _, svh = geometry.scale_offsets(2, num_experts)
    for name, tensor, dtype, shape in (
        ("offsets", bank.offsets, torch.int64, (3, num_experts)),
        ("codebook_index", bank.codebook_index, torch.int32, (3, num_experts)),
        ("scales", bank.scales, torch.float16, (svh + num_experts * geometry.padded_sizes(2)[1],)),
        ("trellis", trellis, torch.int16, (trellis.numel(),)),
    ):
        if tensor.dtype != dtype:
            raise DtypeError(f"{name} has another dtype", expected=dtype, got=tensor.dtype)
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ShapeError(
                f"{name} does not fit the bank, or is not contiguous", expected=shape, got=tuple(tensor.shape)
            )
        if tensor.device != trellis.device:
            raise UsageError(f"{name} must be on the device of the trellis", expected=trellis.device, got=tensor.device)
    if num_experts < 1 or not geometry.codebooks:
        raise UsageError("the bank has no quantized expert", got=(num_experts, bank.spelling))
    least, largest = geometry.trellis_bounds(num_experts)
    if trellis.numel() % ALIGNMENT or not least <= trellis.numel() <= largest:
        raise ShapeError(
            "the trellis does not fit the bank", expected=f"{least} to {largest}, in steps of {ALIGNMENT}",
            got=trellis.numel(),
        )  # fmt: skip


def check_routing(x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, bank: BankTensors) -> None:
    """Raise unless these can be routed through a bank: DtypeError, ShapeError, or UsageError for several devices."""
    if x.dtype not in FLOATS:
        raise DtypeError("x must be a float tensor", expected="float16, bfloat16 or float32", got=x.dtype)
    if expert_ids.dtype not in (torch.int64, torch.int32):
        raise DtypeError("expert_ids must be whole numbers", expected="int64 or int32", got=expert_ids.dtype)
    if expert_weights.dtype not in FLOATS:
        raise DtypeError("expert_weights must be a float tensor", got=expert_weights.dtype)
    hidden = bank.geometry.hidden
    if x.dim() != 2 or x.shape[1] != hidden:
        raise ShapeError("x does not fit the bank", expected=f"(tokens, {hidden})", got=tuple(x.shape))
    if expert_ids.dim() != 2 or expert_ids.shape[0] != x.shape[0]:
        raise ShapeError("expert_ids does not fit x", expected=f"({x.shape[0]}, k)", got=tuple(expert_ids.shape))
    if expert_weights.shape != expert_ids.shape:
        raise ShapeError(
            "expert_weights does not fit expert_ids",
            expected=tuple(expert_ids.shape),
            got=tuple(expert_weights.shape),
        )
    for name, tensor in (("x", x), ("expert_ids", expert_ids), ("expert_weights", expert_weights)):
        if tensor.device != bank.trellis.device:
            raise UsageError(
                f"{name} must be on the device of the bank", expected=bank.trellis.device, got=tensor.device
            )
