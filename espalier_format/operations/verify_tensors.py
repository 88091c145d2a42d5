"""Checks of shards, index, averages and scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from espalier_format.checkpoint.bits import average_bits
from espalier_format.checkpoint.module import expect_scales
from espalier_format.container.index import Index
from espalier_format.container.names import CONFIG_NAME
from espalier_format.errors import BitsMismatchError, EspalierError, MalformedError
from espalier_format.operations.verify_report import Check, judged, passed, skipped

if TYPE_CHECKING:
    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.container.folder import CheckpointFolder
    from espalier_format.container.shard import Shard
    from espalier_format.progress import Progress

_OLD_DTYPES: Final = frozenset(
    {"BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"}
)
"""Dtypes that every supported release of the safetensors library knows."""

_ADVANCE_BYTES: Final = 1 << 20


def check_second_reader(checkpoint: Checkpoint) -> Check:
    """Let the safetensors library read every shard's header and compare names, dtypes and shapes with ours."""
    findings: list[EspalierError] = []
    left_out = 0
    for shard in checkpoint.shards:
        if any(info.dtype not in _OLD_DTYPES for info in shard.header.tensors.values()):
            left_out += 1
        else:
            findings += _second_opinion(shard)
    detail = "its library agrees on every header entry" if not findings else "its library disagrees"
    if left_out:
        detail += f"; left out {left_out:,} with dtypes that not every release of it knows"
    return judged("safetensors", detail, findings)


def _second_opinion(shard: Shard) -> list[EspalierError]:
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - only where it is needed

    try:
        with safe_open(shard.path, framework="numpy") as other:
            names = set(other.keys())
            differing = sorted(names ^ shard.header.tensors.keys())
            for name, info in shard.header.tensors.items():
                if name in names:
                    view = other.get_slice(name)
                    if view.get_dtype() != info.dtype or tuple(view.get_shape()) != info.shape:
                        differing.append(name)
    except SafetensorError as error:
        return [MalformedError(f"the safetensors library refuses it: {error}", path=shard.path)]
    return [
        MalformedError("the safetensors library reads this entry differently", path=shard.path, tensor=name)
        for name in differing
    ]


def check_index(checkpoint: Checkpoint, folder: CheckpointFolder | None) -> Check:
    """Say how the index compares; an Espalier checkpoint whose index differs does not open in the first place."""
    if checkpoint.format == "espalier":
        return passed("index", "agrees with the shard headers")
    if folder is None:
        return skipped("index", "a single file has none")
    try:
        index = Index.read(folder)
    except EspalierError:
        return skipped("index", "cannot be read; the shard headers are used")
    if index is None:
        return skipped("index", "there is none")
    if index.compare({shard.name: shard.header for shard in checkpoint.shards}):
        return skipped("index", "disagrees; the shard headers are used")
    return passed("index", "agrees with the shard headers")


def check_bits(checkpoint: Checkpoint) -> Check:
    """Compute ``bits`` and ``head_bits`` again from the modules; ``BitsMismatchError`` where the config differs."""
    quantization = checkpoint.quantization
    if quantization is None:
        return skipped("bits", "only an Espalier config states them exactly")
    computed = average_bits(quantization.modules, quantization.expert_banks)
    findings: list[EspalierError] = [
        BitsMismatchError(
            f"quantization_config.{field} is not what the modules add up to",
            path=checkpoint.folder.root / CONFIG_NAME,
            expected=expected,
            got=got,
        )
        for field, expected, got in (
            ("bits", computed.bits, quantization.bits),
            ("head_bits", computed.head_bits, quantization.head_bits),
        )
        if expected != got
    ]
    head = "no quantized head" if computed.head_bits is None else f"head_bits {computed.head_bits:.3f}"
    return judged("bits", f"bits {computed.bits:.3f}, {head}", findings)


def check_scales(checkpoint: Checkpoint, progress: Progress) -> Check:
    """Read every suh and svh; a module with an infinite or NaN scale is a ``NonFiniteScaleError`` finding."""
    if checkpoint.packed:
        return skipped("scales", "see packed")
    if not checkpoint.modules:
        return skipped("scales", "there are no quantized modules")
    modules = checkpoint.modules.values()
    findings: list[EspalierError] = []
    progress.start(sum(module.scale_bytes for module in modules), "reading scales")
    read = 0
    expect_scales(modules)
    for module in modules:
        try:
            module.scales()
        except EspalierError as error:
            findings.append(error)
        read += module.scale_bytes
        if read >= _ADVANCE_BYTES:
            progress.advance(read)
            read = 0
    progress.advance(read)
    progress.finish()
    detail = "all finite" if not findings else f"{len(findings):,} of {len(modules):,} modules hold an infinity or NaN"
    return judged("scales", detail, findings)
