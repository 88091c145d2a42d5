"""The files beside the shards: config.json of the output, what describes EXL3 tensors, and which files are copied."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from espalier_format.checkpoint.components import Component, component_of
from espalier_format.checkpoint.stated_quantization import drop_stated_quantization
from espalier_format.checkpoint.storage_claims import STORAGE_NAME
from espalier_format.checkpoint.text_sections import text_sections
from espalier_format.container.json_document import JsonStyle, parse_json
from espalier_format.container.names import CONFIG_NAME, SIGNATURE_NAME
from espalier_format.converters.config_edit import TIE, untie, with_block
from espalier_format.converters.espalier_block import check_block, check_module_names, espalier_block
from espalier_format.converters.exl3_config import exl3_block_of, tensor_storage
from espalier_format.quantize.inventory import is_plain_matrix
from espalier_format.schema.config import Source

if TYPE_CHECKING:
    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.converters.espalier_block import OutputModule
    from espalier_format.quantize.layout import OutputShard

_WEIGHTS: Final = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data"}
)
_OTHER_INDEXES: Final = (".bin.index.json", ".h5.index.json", ".msgpack.index.json", ".safetensors.index.json")


def config_document(
    source: Checkpoint,
    modules: Mapping[str, OutputModule],
    shards: Sequence[OutputShard],
    *,
    seed: int,
    exl3: bool,
    unties: bool,
) -> tuple[bytes, dict[str, Any]]:
    """Return config.json and its ``quantization_config``.

    ``unties``: the head was tied to the embedding and has got tensors of its own. What the source says elsewhere about
    its own quantization, in a text part or under an older name, is left out.

    Raises:
        SchemaError, LimitError: a module has a name that a config cannot hold, or config.json would be too large.
        RuntimeError: the block is wrong otherwise, by a fault of this program.
    """
    config = with_block(source.config, {})
    drop_stated_quantization(config, keep_top=True)
    has_head = any(component_of(name) is Component.HEAD for name in modules)
    replaced = untie(config) if has_head else {}
    if unties:
        # Some architectures take a missing key for true.
        for section in text_sections(config):
            if isinstance(section, dict):
                section[TIE] = False
    if exl3:
        block = exl3_block_of((m.name, m.codebook, m.in_features * m.out_features) for m in modules.values())
    else:
        plain = _plain(shards, modules)
        origin = Source(
            format=_origin(source),
            quantization_config=source.config.get("quantization_config") if source.format == "exl3" else None,
            replaced_config=replaced,
            seed=seed,
        )
        check_module_names(modules, source)
        block = espalier_block(modules, plain, _ignored(plain, modules), origin)
        check_block(block)
    config["quantization_config"] = block
    style = JsonStyle()
    if source.folder.has(CONFIG_NAME):
        style = JsonStyle.of_file(source.folder.resolve(CONFIG_NAME))
    data = style.dumps(config)
    parse_json(data, path=CONFIG_NAME)
    return data, block


def storage_document(block: Mapping[str, Any], shards: Iterable[OutputShard]) -> bytes:
    """Return quantization_config.json of an EXL3 output."""
    listing = ((tensor.name, tensor.dtype, tuple(tensor.shape)) for shard in shards for tensor in shard.tensors)
    return json.dumps({**block, "tensor_storage": tensor_storage(listing)}, indent=4).encode("ascii")


def copied_files(source: Checkpoint) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the other files to copy, and those that are left out since they hold the weights in another form."""
    origin = None if source.quantization is None else source.quantization.source
    outdated = {SIGNATURE_NAME, *(() if origin is None else origin.carried_files.values())}
    if source.format == "exl3":
        outdated.add(STORAGE_NAME)
    names = [name for name in source.other_files if name not in outdated]
    left_out = [n for n in names if PurePosixPath(n).suffix in _WEIGHTS or n.endswith(_OTHER_INDEXES)]
    return tuple(name for name in names if name not in left_out), tuple(left_out)


def _origin(source: Checkpoint) -> str:
    """Return where the weights came from at first: an EXL3 checkpoint leaves traces that must not be forgotten."""
    if source.format in ("plain", "compressed-tensors"):
        return source.format
    origin = None if source.quantization is None else source.quantization.source
    return "exl3" if source.format == "exl3" or (origin is not None and origin.format == "exl3") else "espalier"


def _plain(shards: Iterable[OutputShard], modules: Mapping[str, OutputModule]) -> dict[str, tuple[int, ...]]:
    """Return the tensors that belong to no quantized module, biases of modules not among them."""
    plain: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        for tensor in shard.tensors:
            module, _, kind = tensor.name.rpartition(".")
            if module not in modules or not (kind == "bias" or kind.startswith("esp_")):
                plain[tensor.name] = tuple(tensor.shape)
    return plain


def _ignored(plain: Mapping[str, tuple[int, ...]], modules: Container[str]) -> list[str]:
    """Return the modules that are plain; a plain copy beside a quantized one is none."""
    found = []
    for name, shape in plain.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and len(shape) == 2 and module not in modules and is_plain_matrix(module):
            found.append(module)
    return found
