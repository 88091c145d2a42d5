"""What EXL3 says about itself in JSON: the config block and quantization_config.json (spec/exl3.md §6).

exllamav3 decodes by the tensors alone; these documents inform people and other runtimes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from espalier_format.checkpoint.components import Component, component_of
from espalier_format.codec.codebook import EXL3_MARKERS
from espalier_format.container.header import tensor_bytes
from espalier_format.converters.output import this_producer

if TYPE_CHECKING:
    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.codec.codebook import Codebook

LAYOUT_VERSION: Final = "1.6.5"
"""The version of exllamav3 whose file layout is written."""

PLAIN_HEAD_BITS: Final = 16
_MARKER_OF_FAMILY: Final[Mapping[str, str]] = {"exl3-mcg": "mcg", "exl3-mul1": "mul1"}
_BITS_KEYS: Final[Mapping[Component, str]] = {
    Component.HEAD: "head_bits",
    Component.VISION: "vision_bits",
    Component.MTP: "mtp_bits",
}
_NOT_LISTED: Final = frozenset({Component.VISION, Component.MTP})
_TORCH_NAMES: Final[Mapping[str, str]] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


def marker_of(family: str) -> str | None:
    """Return the last part of the marker tensor's name for a codebook family; None for 3INST, which has none."""
    return _MARKER_OF_FAMILY.get(family)


def exl3_block(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the config block for the modules of a checkpoint that exllamav3 did not quantize itself."""
    return exl3_block_of((module.name, module.codebook, module.weights) for module in checkpoint.modules.values())


def exl3_block_of(modules: Iterable[tuple[str, Codebook, int]]) -> dict[str, Any]:
    """Return the config block for modules given as (name, codebook, weights without padding).

    Bits are averages over true weights, without padding, as exllamav3 states them. ``version`` says whose
    layout the files have; ``producer`` who wrote them.
    """
    weights: dict[str, int] = {}
    half_bits: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for name, codebook, size in modules:
        family = codebook.family.removeprefix("exl3-")
        weights[family] = weights.get(family, 0) + size
        key = _BITS_KEYS.get(component_of(name), "bits")
        half_bits[key] = half_bits.get(key, 0) + codebook.half_steps * size
        sizes[key] = sizes.get(key, 0) + size
    average = {key: round(half_bits[key] / (2 * sizes[key]), 6) for key in sizes}
    block: dict[str, Any] = {
        "quant_method": "exl3",
        "version": LAYOUT_VERSION,
        "bits": average.get("bits", 0.0),
        "head_bits": _whole(average.get("head_bits", PLAIN_HEAD_BITS)),
        "out_scales": "auto",
        "codebook": max(sorted(weights), key=lambda family: weights[family]),
    }
    block |= {key: _whole(average[key]) for key in ("vision_bits", "mtp_bits") if key in average}
    block["producer"] = this_producer().to_json()
    return block


def tensor_storage(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> dict[str, Any]:
    """Return the ``tensor_storage`` of quantization_config.json for EXL3 tensors given as (name, dtype, shape).

    Listed are the leaf modules of the text model, as exllamav3 does: not the vision tower, not MTP, not
    tensors that belong to a module with modules below it, to which it counts the ``conv1d`` of linear attention.
    """
    leaves: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    parents: set[str] = set()
    for name, dtype, shape in tensors:
        module = name.rpartition(".")[0]
        leaves.setdefault(module, {})[name] = (dtype, shape)
        while module and module not in parents:
            module = module.rpartition(".")[0]
            parents.add(module)
    return {
        module: _entry(module, stored)
        for module, stored in leaves.items()
        if module not in parents and component_of(module) not in _NOT_LISTED and not module.endswith(".conv1d")
    }


def _entry(module: str, stored: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "stored_tensors": {
            name: {
                "shape": list(shape),
                "n_bytes": tensor_bytes(dtype, shape),
                "dtype": f"torch.{_TORCH_NAMES.get(dtype, dtype.lower())}",
            }
            for name, (dtype, shape) in stored.items()
        }
    }
    trellis = stored.get(f"{module}.trellis")
    if trellis is not None and len(trellis[1]) == 3:
        entry["quant_format"] = "exl3"
        entry["bits_per_weight"] = _whole(trellis[1][2] / 16)
        for marker, value in EXL3_MARKERS.items():
            if f"{module}.{marker}" in stored:
                entry[f"{marker}_multiplier"] = value
    return entry


def _whole(bits: float) -> int | float:
    """Spell whole bits as an integer, as exllamav3 does."""
    return int(bits) if bits == int(bits) else bits
