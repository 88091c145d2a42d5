"""What EXL3 can hold and what exllamav3 loads: one is an error, the other a warning (spec/exl3.md §6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from espalier_format.checkpoint.exl3_names import MODULE_KINDS, SCALE_KINDS
from espalier_format.codec.rotation import EXL3_BLOCK
from espalier_format.errors import LossyError, UnexpectedTensorError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    from espalier_format.checkpoint.base import Checkpoint, ExpertBankView
    from espalier_format.checkpoint.tensors import TensorRef

_SHOWN: Final = 3
_GATE_AND_UP: Final = (("gate_proj", "up_proj"), ("w1", "w3"))


def check_lossless(checkpoint: Checkpoint) -> None:
    """Raise LossyError unless EXL3 can hold every module of an Espalier checkpoint as it is.

    EXL3 has no grid codebooks, and rotates both sides in blocks of 128.
    """
    offending = [
        f"{name} ({module.codebook.name}, rotation {module.rotation.in_}/{module.rotation.out})"
        for name, module in checkpoint.modules.items()
        if module.codebook.is_grid or tuple(module.rotation) != (EXL3_BLOCK, EXL3_BLOCK)
    ]
    if offending:
        more = f" and {len(offending) - _SHOWN} more" if len(offending) > _SHOWN else ""
        raise LossyError(
            f"EXL3 cannot hold {len(offending)} of {len(checkpoint.modules)} modules without loss: "
            f"{', '.join(offending[:_SHOWN])}{more}; "
            f"it has no grid codebooks and rotates in blocks of {EXL3_BLOCK} only. "
            "They would have to be encoded again: `espalier-format quantize SRC DST --to exl3 --bits N`",
            path=checkpoint.folder.root,
        )


def check_names(plain: Iterable[TensorRef], modules: Container[str]) -> None:
    """Raise UnexpectedTensorError for a plain tensor that an EXL3 reader would take for a part of a module.

    ``plain`` are all tensors of the output that belong to none, ``modules`` the quantized modules of the output. A row
    table, a ``.trellis`` of two dimensions, is no module: it may have scales beside it.
    """
    found = [tensor for tensor in plain if "." in tensor.name and tensor.name.rpartition(".")[2] in MODULE_KINDS]
    tables = {tensor.name for tensor in found if tensor.name.endswith(".trellis") and len(tensor.shape) == 2}
    for tensor in found:
        module, _, kind = tensor.name.rpartition(".")
        if module in modules:
            message = f"in EXL3 this plain tensor would belong to the quantized module {module}"
        elif kind in ("trellis", *SCALE_KINDS) and f"{module}.trellis" not in tables:
            message = "in EXL3 this plain tensor would be a part of a module that lacks others"
        else:
            continue
        raise UnexpectedTensorError(message, path=tensor.shard.path, tensor=tensor.name)


def loading_warnings(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return what exllamav3 1.6.5 does not load, or only slowly, although the format can express it."""
    found = [line for bank in checkpoint.expert_banks.values() for line in _bank_limits(checkpoint, bank)]
    if not found:
        return ()
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    rule = "one width and codebook per projection for all experts of a layer, and the same width for gate and up"
    return (f"exllamav3 wants {rule}: {'; '.join(found[:_SHOWN])}{more}",)


def _bank_limits(checkpoint: Checkpoint, bank: ExpertBankView) -> Iterator[str]:
    widths: dict[str, int] = {}
    for projection, experts in bank.projections.items():
        codebooks = {checkpoint.modules[name].codebook for name in experts if name is not None}
        widths[projection] = max(codebook.half_steps for codebook in codebooks)
        if len(codebooks) > 1:
            yield f"{bank.name} {projection} has {', '.join(sorted(codebook.name for codebook in codebooks))}"
        if None in experts:
            yield f"{bank.name} {projection} has quantized and plain experts"
    for gate, up in _GATE_AND_UP:
        if gate in widths and up in widths and widths[gate] != widths[up]:
            yield f"{bank.name} has {gate} at {widths[gate] / 2:g} bits and {up} at {widths[up] / 2:g}"
