"""Weights that others have quantized, known by their tensors: for checkpoints whose config.json does not say so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from espalier_format.checkpoint.tensors import FLOATING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from espalier_format.checkpoint.tensors import TensorRef

_WEIGHTS: Final[Mapping[str, tuple[str, ...]]] = {
    ".scales": (".qweight", ".weight", ".codes"),
    ".qzeros": (".qweight",),
    ".q_scale": (".q_weight",),
    ".scale": (".weight", ".W_q"),
    ".SCB": (".weight",),
    "_scale": ("",),
    "_scale_inv": ("",),
    ".absmax": ("",),
    "_scales": ("_blocks",),
}
"""How a tensor of scales ends, and what stands there instead in the name of the weight that they scale.

GPTQ and AWQ (whose config may be in quantize_config.json alone), MLX, AQLM, EXL2, HQQ, bitsandbytes, FP8 with scales
per tensor, channel or block, MXFP4.
"""
_ENDINGS: Final = tuple(_WEIGHTS)


class QuantizedTensor(NamedTuple):
    """The names of a weight that is stored quantized, and of its scales."""

    weight: str
    scales: str


def quantized_tensor(tensors: Mapping[str, TensorRef]) -> QuantizedTensor | None:
    """Return the first weight of no floating dtype that has scales beside it, in the order of the scales, or None.

    Meant for tensors of no format that this library reads; what is scaled but stored as F64, F32, F16 or BF16 does not
    count, and neither do integers without scales.
    """
    for scales in tensors:
        if not scales.endswith(_ENDINGS):
            continue
        for ending, endings in _WEIGHTS.items():
            names = (scales.removesuffix(ending) + other for other in endings if scales.endswith(ending))
            for weight in names:
                if weight in tensors and tensors[weight].dtype not in FLOATING:
                    return QuantizedTensor(weight, scales)
    return None
