"""model.safetensors.index.json: which shard holds which tensor.

Shard headers are authoritative: an index is only ever compared with them, and written anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from espalier_format.container.folder import CheckpointFolder, check_name
from espalier_format.container.header import Header
from espalier_format.errors import SchemaError
from espalier_format.read_only import ReadOnlyDict

INDEX_NAME: Final = "model.safetensors.index.json"


class IndexProblem(Enum):
    """How an index and the shard headers can differ."""

    TENSOR_MISSING = "lists a tensor that no shard holds"
    TENSOR_UNLISTED = "does not list a tensor"
    WRONG_SHARD = "names another shard than the one that holds the tensor"
    SHARD_MISSING = "names a shard that does not exist"
    TOTAL_SIZE = "states another total size"


@dataclass(frozen=True, slots=True)
class IndexDifference:
    """One disagreement: `shard` is what the index says, `found` what the headers say; None where there is none."""

    problem: IndexProblem
    tensor: str | None = None
    shard: str | None = None
    found: str | None = None

    @property
    def informational(self) -> bool:
        """Whether no reader is misled by it: total_size is stated differently by different writers."""
        return self.problem is IndexProblem.TOTAL_SIZE

    @property
    def description(self) -> str:
        """What the index does, without a subject, to follow its name."""
        if self.problem is IndexProblem.SHARD_MISSING:
            return f"names {self.shard}, which is not there"
        subject = "" if self.tensor is None else f": {self.tensor}"
        detail = ", ".join(
            f"{label} {value}" for label, value in (("index", self.shard), ("headers", self.found)) if value is not None
        )
        return f"{self.problem.value}{subject}" + (f" ({detail})" if detail else "")

    def __str__(self) -> str:
        return f"{INDEX_NAME} {self.description}"


@dataclass(frozen=True, slots=True)
class Index:
    """The content of an index; `metadata` may hold anything, usually total_size in bytes."""

    weight_map: Mapping[str, str]
    metadata: Mapping[str, Any] = field(default_factory=ReadOnlyDict)

    @classmethod
    def read(cls, folder: CheckpointFolder) -> Index | None:
        """Read the index of a checkpoint folder; None if it has none.

        Raises:
            SchemaError: not of the form {"metadata": {…}, "weight_map": {tensor: shard}}.
            PathError: a shard name, or the index itself, leads out of the folder.
            MalformedError, LimitError, SourceError: as `read_json`.
        """
        if not folder.has(INDEX_NAME):
            return None
        document = folder.read_json_object(INDEX_NAME)
        metadata, weight_map = document.get("metadata", {}), document.get("weight_map")
        if not isinstance(metadata, dict):
            raise SchemaError("metadata must be an object", path=folder.root / INDEX_NAME)
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise SchemaError("weight_map must map tensor names to file names", path=folder.root / INDEX_NAME)
        try:
            "".join((*weight_map, *set(weight_map.values()))).encode("utf-8")
        except UnicodeEncodeError as error:
            raise SchemaError("weight_map names half of a surrogate pair", path=folder.root / INDEX_NAME) from error
        for shard in set(weight_map.values()):
            check_name(shard, path=folder.root / INDEX_NAME)
        return cls(weight_map, metadata)

    @classmethod
    def build(cls, headers: Mapping[str, Header]) -> Index:
        """Return the index of the given shards (name → header), as transformers writes it.

        Of a tensor that several shards hold, the last of them in name order is listed: the one exllamav3 takes.
        """
        weight_map = {tensor: shard for shard in sorted(headers) for tensor in headers[shard].tensors}
        return cls(dict(sorted(weight_map.items())), {"total_size": _total_size(headers)})

    def compare(self, headers: Mapping[str, Header]) -> list[IndexDifference]:
        """Return all differences from the headers of the shards that exist (name → header); empty if none."""
        differences = [
            IndexDifference(IndexProblem.SHARD_MISSING, shard=shard)
            for shard in sorted(set(self.weight_map.values()) - headers.keys())
        ]
        holders: dict[str, list[str]] = {}
        for shard in sorted(headers):
            for tensor in headers[shard].tensors:
                holders.setdefault(tensor, []).append(shard)
        for tensor, shard in self.weight_map.items():
            held = holders.get(tensor)
            if held is None:
                differences.append(IndexDifference(IndexProblem.TENSOR_MISSING, tensor, shard))
            elif shard not in held:
                differences.append(IndexDifference(IndexProblem.WRONG_SHARD, tensor, shard, held[-1]))
        differences.extend(
            IndexDifference(IndexProblem.TENSOR_UNLISTED, tensor, found=held[-1])
            for tensor, held in holders.items()
            if tensor not in self.weight_map
        )
        stated, actual = self.metadata.get("total_size"), _total_size(headers)
        if stated is not None and stated != actual:
            differences.append(IndexDifference(IndexProblem.TOTAL_SIZE, shard=str(stated)[:40], found=str(actual)))
        return differences

    def dumps(self) -> bytes:
        """Serialise as transformers does: two blanks of indentation, sorted keys, a newline at the end."""
        document = {"metadata": dict(self.metadata), "weight_map": dict(self.weight_map)}
        return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode("ascii")


def _total_size(headers: Mapping[str, Header]) -> int:
    return sum(info.nbytes for header in headers.values() for info in header.tensors.values())
