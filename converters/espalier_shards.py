"""Which tensors the shards of an Espalier checkpoint get when it is made from EXL3 (spec/exl3.md §5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier_format.checkpoint.espalier import ESP_PREFIX, VERSION_KEY
from espalier_format.converters.shard_rewrite import Item, Kept, Made, ShardPlan, in_file_order
from espalier_format.schema.config import FORMAT_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.checkpoint.tensors import TensorRef
    from espalier_format.converters.exl3_modules import ImportedModule


def plan_espalier_shards(
    source: Checkpoint, modules: Mapping[str, ImportedModule]
) -> tuple[list[ShardPlan], tuple[str, ...]]:
    """Return the shards to write, in order, and warnings.

    Of a repeated tensor the first is kept, and a shard that holds nothing else is left out. Shards without
    tensors of quantized modules, or repeated ones, are copied byte for byte.
    """
    translated: dict[str, Item | None] = {}
    for imported in modules.values():
        translated.update(espalier_items(imported))
    plans: list[ShardPlan] = []
    warnings: list[str] = []
    repeated = 0
    for shard in source.shards:
        items: list[Item] = []
        changed = False
        for info in in_file_order(shard):
            if source.tensors[info.name].shard is not shard:
                changed = True
                repeated += 1
            elif info.name in translated:
                item = translated[info.name]
                changed = True
                if item is not None:
                    items.append(item)
            else:
                items.append(Kept(info.name, info))
        metadata = dict(shard.header.metadata)
        if any(item.name.rpartition(".")[2].startswith(ESP_PREFIX) for item in items):
            metadata |= {"format": "pt", VERSION_KEY: str(FORMAT_VERSION)}
        if items:
            plans.append(ShardPlan(shard, tuple(items), metadata or None, copied=not changed))
        else:
            warnings.append(f"{shard.name} has no tensor of its own for the output, and is left out")
    if repeated:
        warnings.append(f"{repeated} repeated tensors are left out, and do not come back on the way back")
    return plans, tuple(warnings)


def espalier_items(imported: ImportedModule) -> dict[str, Item | None]:
    """Map the tensors of an EXL3 module to what becomes of them; None for the marker, which the config replaces."""
    module = imported.module
    items: dict[str, Item | None] = {
        module.trellis.name: Kept(f"{module.name}.esp_trellis", module.trellis.info),
        module.suh.name: _scale(f"{module.name}.esp_suh", module.suh, packed=module.packed_su),
        module.svh.name: _scale(f"{module.name}.esp_svh", module.svh, packed=module.packed_sv),
    }
    if module.marker is not None:
        items[module.marker.name] = None
    if module.bias is not None and imported.crops_bias:
        items[module.bias.name] = cropped_bias(module.bias, imported.out_features)
    return items


def _scale(name: str, stored: TensorRef, *, packed: bool) -> Item:
    if not packed:
        return Kept(name, stored.info)
    return Made(name, "F16", (16 * stored.shape[0],), lambda: _expanded_signs(stored))


def _expanded_signs(stored: TensorRef) -> bytes:
    from espalier_format.codec.signs import unpack_signs  # noqa: PLC0415 - numpy, for legacy files only

    return unpack_signs(stored.array()).astype("<f2", copy=False).tobytes()


def cropped_bias(bias: TensorRef, size: int) -> Made:
    """Return the first ``size`` values of a bias, under its name and in its dtype."""
    width = bias.nbytes // bias.shape[0]
    return Made(bias.name, bias.dtype, (size,), lambda: bytes(bias.data()[: size * width]))
