"""``espalier_manifest.json``: sizes and hashes of all files, decode digests of modules (spec/manifest.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import Field, ValidationError, ValidationInfo, model_validator

from espalier_format.container.folder import check_name
from espalier_format.container.hashing import GIT_BLOB_MAX_BYTES
from espalier_format.container.names import MANIFEST_NAME, SIGNATURE_NAME
from espalier_format.errors import FormatVersionError, SchemaError
from espalier_format.schema.base import (
    Document,
    DottedName,
    FrozenModel,
    Large,
    NotNull,
    ReadOnly,
    Sha1Hex,
    Sha256Hex,
    Text,
    describe,
    document_path,
    json_path,
    schema_error,
)
from espalier_format.schema.config import Producer

if TYPE_CHECKING:
    from pathlib import Path

UNLISTED_FILES: Final = frozenset({MANIFEST_NAME, SIGNATURE_NAME, "README.md", ".gitattributes"})
"""Files that a manifest must not list: itself, its signature, and what the Hub lets people edit."""

MANIFEST_VERSION: Final = 1

_ROOT: Final = "manifest"


class FileEntry(FrozenModel):
    """Size in bytes and hashes of one file; ``git_blob_sha1`` for files up to 10 MiB only."""

    size: Annotated[int, Field(ge=0, le=2**63 - 1)]
    sha256: Sha256Hex
    git_blob_sha1: Annotated[Sha1Hex | None, NotNull()] = None

    def to_json(self) -> dict[str, object]:
        """Return the JSON object."""
        blob = {} if self.git_blob_sha1 is None else {"git_blob_sha1": self.git_blob_sha1}
        return {"size": self.size, "sha256": self.sha256, **blob}


class BaseModelReference(FrozenModel):
    """The model that was quantized, as the person who quantized it stated it."""

    repo: Annotated[Text, Field(min_length=1)]
    revision: Annotated[Text | None, NotNull()] = None
    license: Annotated[Text | None, NotNull()] = None

    def to_json(self) -> dict[str, object]:
        """Return the JSON object without the fields that say nothing."""
        members = {"repo": self.repo, "revision": self.revision, "license": self.license}
        return {key: value for key, value in members.items() if value is not None}


class Manifest(FrozenModel):
    """The whole manifest. ``decode_digests`` maps module names to their decode digests."""

    # The docstring is the description in the JSON Schema. However an object is made, the rules of parse_manifest hold,
    # with the same errors, but a field of the wrong form is a pydantic.ValidationError.
    manifest_version: Literal[1]
    producer: Producer
    files: Annotated[Mapping[Text, FileEntry], Large, ReadOnly]
    decode_digests: Annotated[Annotated[Mapping[DottedName, Sha256Hex], Large, ReadOnly] | None, NotNull()] = None
    base_model: Annotated[BaseModelReference | None, NotNull()] = None
    command: Annotated[Text | None, NotNull()] = None

    @model_validator(mode="before")
    @classmethod
    def _check_version(cls, document: Any, info: ValidationInfo) -> Any:
        """Refuse another version before a field is looked at."""
        if isinstance(document, Mapping):
            _check_version(document, document_path(info))
        return document

    @model_validator(mode="after")
    def _check_files(self, info: ValidationInfo) -> Self:
        """Check what no field can check alone."""
        for name, entry in self.files.items():
            _check_file(name, entry, document_path(info))
        return self

    def to_json(self) -> dict[str, object]:
        """Return the JSON object, keys in the order of the specification; ``parse_manifest`` reads it."""
        document: dict[str, object] = {
            "manifest_version": self.manifest_version,
            "producer": self.producer.to_json(),
        }
        if self.base_model is not None:
            document["base_model"] = self.base_model.to_json()
        if self.command is not None:
            document["command"] = self.command
        document["files"] = {name: entry.to_json() for name, entry in self.files.items()}
        if self.decode_digests is not None:
            document["decode_digests"] = dict(self.decode_digests)
        return document


def parse_manifest(document: object, path: str | Path | None = None) -> Manifest:
    """Check a parsed manifest and return it as an object.

    Raises:
        FormatVersionError: ``manifest_version`` is missing or not the integer 1.
        SchemaError: a key is missing, unknown or of the wrong form, a file is listed that must not be, or
            ``git_blob_sha1`` is missing for a file up to 10 MiB or given for a larger one.
        PathError: a file name is not relative, or leads out of the checkpoint folder.
    """
    if not isinstance(document, Mapping):
        raise SchemaError(f"the manifest must be a JSON object, but is {describe(document)}", path=path)
    try:
        return Manifest.model_validate(dict(document), context=Document(path))
    except ValidationError as error:
        raise schema_error(error, _ROOT, path) from None


def _check_version(document: Mapping[str, object], path: str | Path | None) -> None:
    version = document.get("manifest_version")
    if type(version) is not int or version != MANIFEST_VERSION:
        stated = "missing" if "manifest_version" not in document else describe(version)
        raise FormatVersionError(f"manifest_version is {stated}; this reader knows version 1 only", path=path)


def _check_file(name: str, entry: FileEntry, path: str | Path | None) -> None:
    check_name(name, path=path)
    where = json_path(_ROOT, ("files", name))
    if name in UNLISTED_FILES or any(part.startswith(".") for part in name.split("/")[:-1]):
        raise SchemaError(f"{where}: a manifest must not list this file", path=path)
    if (entry.git_blob_sha1 is not None) != (entry.size <= GIT_BLOB_MAX_BYTES):
        raise SchemaError(f"{where}: files up to 10 MiB, and no others, have git_blob_sha1", path=path)
