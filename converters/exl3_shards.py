"""Which tensors the shards of an EXL3 checkpoint get when it is made from Espalier (spec/exl3.md §6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier_format.checkpoint.espalier import VERSION_KEY
from espalier_format.checkpoint.module import expect_scales
from espalier_format.codec.codebook import EXL3_MARKERS
from espalier_format.converters.exl3_config import marker_of
from espalier_format.converters.shard_rewrite import Item, Kept, Made, ShardPlan, in_file_order
from espalier_format.errors import LossyError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.checkpoint.module import QuantizedModule
    from espalier_format.checkpoint.tensors import TensorRef
    from espalier_format.schema.config import Source


def plan_exl3_shards(source: Checkpoint, origin: Source) -> tuple[list[ShardPlan], list[str]]:
    """Return the shards to write, in order, and warnings; reads all scales.

    ``origin`` says which scales were packed signs, and which biases had their true size.

    Raises:
        NonFiniteScaleError: a scale is infinite or NaN.
    """
    packed, unpadded = set(origin.packed_signs), set(origin.unpadded_bias)
    translated: dict[str, tuple[Item, ...]] = {}
    warnings: list[str] = []
    expect_scales(source.modules.values())
    for module in source.modules.values():
        module.scales()
        for name in (f"{module.name}.su", f"{module.name}.sv"):
            if name in packed and not _is_packable(module, name):
                packed.remove(name)
                warnings.append(f"{name} is not written as packed signs, since its scales are no longer +1 and -1")
        translated.update(exl3_items(module, packed, unpadded, keep_bias_dtype=origin.format == "exl3"))
    plans: list[ShardPlan] = []
    for shard in source.shards:
        items: list[Item] = []
        changed = False
        for info in in_file_order(shard):
            if info.name in translated:
                changed = True
                items.extend(translated[info.name])
            else:
                items.append(Kept(info.name, info))
        metadata = dict(shard.header.metadata)
        if metadata.pop(VERSION_KEY, None) is not None:
            metadata.pop("format", None)
        plans.append(ShardPlan(shard, tuple(items), metadata or None, copied=not changed))
    return plans, warnings


def exl3_items(
    module: QuantizedModule, packed: set[str], unpadded: set[str], *, keep_bias_dtype: bool
) -> Iterator[tuple[str, tuple[Item, ...]]]:
    """Yield the tensors of an Espalier module with what becomes of each; the marker goes just before the trellis.

    A tensor that stays as it is may be left out.
    """
    trellis: tuple[Item, ...] = (Kept(f"{module.name}.trellis", module.trellis.info),)
    marker = marker_of(module.codebook.family)
    if marker is not None:
        value = EXL3_MARKERS[marker].to_bytes(4, "little")
        trellis = (Made(f"{module.name}.{marker}", "I32", (), lambda: value), *trellis)
    yield module.trellis.name, trellis
    for scale, kind in ((module.suh, "su"), (module.svh, "sv")):
        name = f"{module.name}.{kind}"
        if name in packed:
            yield scale.name, (_packed(name, scale),)
        else:
            yield scale.name, (Kept(f"{name}h", scale.info),)
    bias = module.bias
    if bias is not None:
        size = module.out_features if module.name in unpadded else module.padded_out
        widened = bias.dtype == "BF16" and not keep_bias_dtype
        if size != bias.shape[0] or widened:
            yield bias.name, (padded_bias(bias, size, widened=widened),)


def _is_packable(module: QuantizedModule, name: str) -> bool:
    scale = module.suh if name.endswith(".su") else module.svh
    try:
        _pack(scale)
    except LossyError:
        return False
    return True


def _pack(scale: TensorRef) -> bytes:
    from espalier_format.codec.signs import pack_signs  # noqa: PLC0415 - numpy, for legacy files only

    return pack_signs(scale.array()).astype("<i2", copy=False).tobytes()


def _packed(name: str, scale: TensorRef) -> Made:
    return Made(name, "I16", (scale.shape[0] // 16,), lambda: _pack(scale))


def padded_bias(bias: TensorRef, size: int, *, widened: bool) -> Made:
    """Return the bias with +0 up to ``size``; BF16 as F32, which EXL3 readers take and which holds it exactly."""
    missing = size - bias.shape[0]

    def make() -> bytes:
        data = bytes(bias.data())
        if widened:  # a BF16 is the upper half of a little-endian F32
            data = b"".join(b"\0\0" + data[start : start + 2] for start in range(0, len(data), 2))
        return data + bytes(missing * (len(data) // bias.shape[0]))

    return Made(bias.name, "F32" if widened else bias.dtype, (size,), make)
