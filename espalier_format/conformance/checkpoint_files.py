"""The files of the tiny checkpoints of the kit, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

import numpy as np

from espalier_format.checkpoint.bits import average_bits
from espalier_format.codec.codebook import get_codebook
from espalier_format.conformance import noise
from espalier_format.conformance.checkpoints import KitBank, KitCheckpoint
from espalier_format.conformance.module_case import ModuleCase
from espalier_format.conformance.stored import StoredTensor, safetensors_bytes
from espalier_format.container.hashing import FileHasher
from espalier_format.container.index import INDEX_NAME
from espalier_format.container.names import MANIFEST_NAME
from espalier_format.kernels.digest import decode_digest
from espalier_format.schema.config import CodebookConstants, ModuleSpec
from espalier_format.schema.expert_bank import ExpertBank, Projection, Rotation

_METADATA: Final = {"format": "pt", "espalier_format_version": "1"}
_PRODUCER: Final = {"name": "espalier-format conformance kit", "version": "1"}


@lru_cache(maxsize=4)
def checkpoint_files(checkpoint: KitCheckpoint) -> Mapping[str, bytes]:
    """Return the files of a checkpoint, name to content, the same on every machine."""
    shards = _shards(checkpoint)
    files = {
        name: safetensors_bytes(tensors, _METADATA if _is_quantized(tensors) else {"format": "pt"})
        for name, tensors in shards.items()
    }
    total = sum(len(tensor.data) for tensors in shards.values() for tensor in tensors.values())
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    files[INDEX_NAME] = json_bytes(index)
    files["config.json"] = json_bytes({**checkpoint.config, "quantization_config": _block(checkpoint)})
    if checkpoint.manifest:
        files[MANIFEST_NAME] = json_bytes(_manifest(checkpoint, files))
    return files


def json_bytes(document: object) -> bytes:
    """Return a JSON document as the kit writes it: ASCII, indented by two blanks, a line feed at the end."""
    return (json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False) + "\n").encode("ascii")


def _shards(checkpoint: KitCheckpoint) -> dict[str, dict[str, StoredTensor]]:
    """Plain tensors lie in the first shard, modules in the others in turn."""
    count = checkpoint.shards
    names = (
        ["model.safetensors"] if count == 1 else [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    )
    shards: dict[str, dict[str, StoredTensor]] = {name: {} for name in names}
    for name, (dtype, shape) in checkpoint.plain.items():
        shards[names[0]][name] = _plain(f"{checkpoint.name}/{name}", dtype, shape)
    biases = {name: module.bias for name, module in checkpoint.modules.items()}
    for number, (name, case) in enumerate(checkpoint.all_modules().items()):
        held = shards[names[-1 - number % max(count - 1, 1)]]
        tensors = case.tensors()
        held[f"{name}.esp_trellis"] = StoredTensor.of("I16", tensors.trellis)
        held[f"{name}.esp_suh"] = StoredTensor.of("F16", tensors.suh)
        held[f"{name}.esp_svh"] = StoredTensor.of("F16", tensors.svh)
        bias = biases.get(name)
        if bias is not None:
            held[f"{name}.bias"] = _plain(f"{checkpoint.name}/{name}.bias", bias, (case.out_features,))
    return shards


def _plain(label: str, dtype: str, shape: tuple[int, ...]) -> StoredTensor:
    return StoredTensor.of(dtype, noise.activations(label, 1, int(np.prod(shape))).reshape(shape))


def _is_quantized(tensors: Mapping[str, StoredTensor]) -> bool:
    return any(name.rpartition(".")[2].startswith("esp_") for name in tensors)


def _block(checkpoint: KitCheckpoint) -> dict[str, object]:
    specs = {name: _spec(module.case) for name, module in checkpoint.modules.items()}
    banks = {bank.name: _bank(bank) for bank in checkpoint.banks}
    average = average_bits(specs, banks)
    names = sorted({case.codebook for case in checkpoint.all_modules().values()}, key=_by_width)
    matrices = (name for name, (_, shape) in checkpoint.plain.items() if len(shape) == 2)
    return {
        "quant_method": "espalier",
        "format_version": 1,
        "required_features": [],
        "producer": _PRODUCER,
        "bits": average.bits,
        "head_bits": average.head_bits,
        "codebooks": {name: _constants(name) for name in names},
        "modules": {name: spec.to_json() for name, spec in specs.items()},
        "expert_banks": {name: bank.to_json() for name, bank in banks.items()},
        "ignore": sorted(name.removesuffix(".weight") for name in matrices if "embed" not in name),
    }


def _spec(case: ModuleCase) -> ModuleSpec:
    return ModuleSpec(
        codebook=case.codebook,
        in_features=case.in_features,
        out_features=case.out_features,
        rotation=Rotation.model_validate({"in": case.rotation_in, "out": case.rotation_out}),
        size_source="exact",
    )


def _bank(bank: KitBank) -> ExpertBank:
    return ExpertBank(
        num_experts=len(bank.assignment[0]),
        projections={
            name: Projection(
                in_features=inputs,
                out_features=outputs,
                rotation=Rotation.model_validate({"in": bank.rotation[0], "out": bank.rotation[1]}),
                size_source="exact",
                codebooks=bank.codebooks,
                assignment=assignment,
            )
            for (name, inputs, outputs), assignment in zip(bank.projections, bank.assignment, strict=True)
        },
    )


def _by_width(name: str) -> tuple[int, str]:
    return get_codebook(name).half_steps, name


def _constants(name: str) -> dict[str, object]:
    book = get_codebook(name)
    addend = f"0x{book.addend:08X}" if book.addend else None
    return CodebookConstants(multiplier=book.multiplier_hex, addend=addend, sha256=book.sha256).to_json()


def _manifest(checkpoint: KitCheckpoint, files: Mapping[str, bytes]) -> dict[str, object]:
    entries: dict[str, object] = {}
    for name, data in sorted(files.items()):
        hasher = FileHasher(len(data))
        hasher.update(data)
        record = hasher.record()
        entries[name] = {"size": record.size, "sha256": record.sha256, "git_blob_sha1": record.git_blob_sha1}
    digests = {name: decode_digest(case.tensors().trellis, case.book) for name, case in _modules(checkpoint)}
    return {"manifest_version": 1, "producer": _PRODUCER, "files": entries, "decode_digests": digests}


def _modules(checkpoint: KitCheckpoint) -> list[tuple[str, ModuleCase]]:
    return sorted(checkpoint.all_modules().items())
