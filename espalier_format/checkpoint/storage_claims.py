"""What quantization_config.json of an EXL3 checkpoint says about the shards, compared with them.

The file is informational: exllamav3 never reads it, and tools that rewrite shards leave it stale. So
every disagreement is a warning (spec/exl3.md §1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from espalier_format.codec.codebook import EXL3_MARKERS
from espalier_format.errors import MalformedError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from espalier_format.checkpoint.tensors import TensorTable
    from espalier_format.container.folder import CheckpointFolder

STORAGE_NAME: Final = "quantization_config.json"

_SHOWN: Final = 3
_DTYPES: Final = {
    "torch.bool": "BOOL",
    "torch.uint8": "U8",
    "torch.int8": "I8",
    "torch.int16": "I16",
    "torch.int32": "I32",
    "torch.int64": "I64",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float32": "F32",
    "torch.float64": "F64",
}


def storage_warnings(folder: CheckpointFolder, table: TensorTable) -> tuple[str, ...]:
    """Return at most one warning, which counts the disagreements and shows the first few.

    Raises:
        LimitError, PathError: the file exceeds a limit, or is a link out of the folder.
    """
    if not folder.has(STORAGE_NAME):
        return ()
    try:
        document = folder.read_json_object(STORAGE_NAME)
    except (MalformedError, SchemaError) as error:
        return (f"{error}; the file is not used",)
    storage = document.get("tensor_storage", {})
    if not isinstance(storage, dict):
        return (f"{STORAGE_NAME}: tensor_storage is no JSON object; the file is not used",)
    found = [line for module, claims in storage.items() for line in _disagreements(module, claims, table)]
    if not found:
        return ()
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return (f"{STORAGE_NAME} disagrees with the shards: {'; '.join(found[:_SHOWN])}{more}; the shards are used",)


def _disagreements(module: str, claims: Any, table: TensorTable) -> Iterator[str]:
    if not isinstance(claims, dict):
        yield f"{_short(module)} is no JSON object"
        return
    tensors = claims.get("stored_tensors", {})
    if not isinstance(tensors, dict):
        yield f"{_short(module)}.stored_tensors is no JSON object"
        return
    for name, stated in tensors.items():
        info = table.infos.get(name)
        if info is None:
            yield f"no shard holds {_short(name)}"
        elif not isinstance(stated, dict):
            yield f"{_short(name)} is no JSON object"
        else:
            if stated.get("shape", list(info.shape)) != list(info.shape):
                yield f"{_short(name)} has shape {list(info.shape)}, not {_short(stated['shape'])}"
            dtype = stated.get("dtype")
            if dtype is not None and not (isinstance(dtype, str) and _DTYPES.get(dtype) == info.dtype):
                yield f"{_short(name)} has dtype {info.dtype}, not {_short(dtype)}"
            if stated.get("n_bytes", info.nbytes) != info.nbytes:
                yield f"{_short(name)} has {info.nbytes} bytes, not {_short(stated['n_bytes'])}"
    yield from _width_and_codebook(module, claims, table)


def _width_and_codebook(module: str, claims: dict[str, Any], table: TensorTable) -> Iterator[str]:
    trellis = table.infos.get(f"{module}.trellis")
    if trellis is None or len(trellis.shape) != 3:
        if claims.get("quant_format") == "exl3":
            yield f"{_short(module)} is not quantized"
        return
    bits, actual = claims.get("bits_per_weight"), trellis.shape[2] / 16
    # Up to 1.4.1 half rates were rounded down.
    if bits is not None and bits not in (actual, trellis.shape[2] // 16):
        yield f"{_short(module)} has {actual:g} bits per weight, not {_short(bits)}"
    for marker, constant in EXL3_MARKERS.items():
        stated = claims.get(f"{marker}_multiplier")
        if stated is not None and f"{module}.{marker}" not in table.infos:
            yield f"{_short(module)} has no {marker} codebook"
        elif stated is not None and stated != constant:
            yield f"{_short(module)} has the {marker} multiplier {constant}, not {_short(stated)}"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 100 else text[:100] + "…"
