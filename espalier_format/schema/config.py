"""``quantization_config`` of config.json: what a runtime plans from before it reads a tensor (spec/config.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import Field, ValidationError, ValidationInfo, model_validator

from espalier_format.errors import FeatureError, FormatVersionError, SchemaError, SourceError
from espalier_format.read_only import ReadOnlyDict
from espalier_format.schema.base import (
    Document,
    DottedName,
    FrozenModel,
    JsonArray,
    Large,
    NotNull,
    ReadOnly,
    Sha256Hex,
    Size,
    Text,
    describe,
    document_path,
    schema_error,
)
from espalier_format.schema.expert_bank import ExpertBank, Rotation, SizeSource
from espalier_format.schema.semantics import check_codebooks, check_semantics, check_tensor_count

if TYPE_CHECKING:
    from pathlib import Path

QUANT_METHOD: Final = "espalier"
FORMAT_VERSION: Final = 1
ROOT: Final = "quantization_config"


class Producer(FrozenModel):
    """The program that wrote a checkpoint."""

    name: Text
    version: Text

    def to_json(self) -> dict[str, object]:
        """Return the JSON object."""
        return {"name": self.name, "version": self.version}


class CodebookConstants(FrozenModel):
    """The constants a codebook was used with, so that a reader with others refuses (``spec/config.md`` §3)."""

    multiplier: Annotated[str, Field(pattern=r"^0x[0-9A-F]{8}$")]
    addend: Annotated[Annotated[str, Field(pattern=r"^0x[0-9A-F]{8}$")] | None, NotNull()] = None
    sha256: Sha256Hex

    def to_json(self) -> dict[str, object]:
        """Return the JSON object; ``addend`` only where the codebook has one."""
        addend = {} if self.addend is None else {"addend": self.addend}
        return {"multiplier": self.multiplier, **addend, "sha256": self.sha256}


class ModuleSpec(FrozenModel):
    """One quantized linear module that is no expert of a bank. Sizes are those without padding."""

    codebook: Text
    in_features: Size
    out_features: Size
    rotation: Rotation
    size_source: SizeSource

    def to_json(self) -> dict[str, object]:
        """Return the JSON object, keys in the order of the specification."""
        return {
            "codebook": self.codebook,
            "in_features": self.in_features,
            "out_features": self.out_features,
            "rotation": self.rotation.to_json(),
            "size_source": self.size_source,
        }


class Source(FrozenModel):
    """What the checkpoint was made from, and whatever a lossless way back needs (``spec/config.md`` §7).

    ``quantization_config`` is the source's own block, verbatim. ``packed_signs`` lists the full names of
    the source's legacy sign tensors; ``unpadded_bias`` the modules whose bias had the true size in the
    source although the weight is padded. ``replaced_config`` maps a dotted path in config.json to the
    value that stood there. ``carried_files`` maps a file name of the source to its name in this
    checkpoint. ``seed`` is that of an encoder, where modules were encoded and not converted. ``index`` says whether
    the source had an index file. ``tensor_list_sha256`` tells whether
    the way back gives the same tensors again: the SHA-256 of the source's list of tensors.
    """

    format: Annotated[str, Field(min_length=1)]
    quantization_config: Annotated[Mapping[str, object], ReadOnly] | None = None
    packed_signs: Annotated[tuple[Text, ...], JsonArray, Large] = ()
    unpadded_bias: Annotated[tuple[Text, ...], JsonArray, Large] = ()
    replaced_config: Annotated[Mapping[str, object], ReadOnly] = Field(default_factory=ReadOnlyDict)
    carried_files: Annotated[Mapping[Text, Text], Large, ReadOnly] = Field(default_factory=ReadOnlyDict)
    index: bool | None = None
    tensor_list_sha256: Sha256Hex | None = None
    seed: int | None = None

    def to_json(self) -> dict[str, object]:
        """Return the JSON object without the fields that say nothing."""
        members: dict[str, object] = {
            "format": self.format,
            "quantization_config": None if self.quantization_config is None else dict(self.quantization_config),
            "packed_signs": list(self.packed_signs),
            "unpadded_bias": list(self.unpadded_bias),
            "replaced_config": dict(self.replaced_config),
            "carried_files": dict(self.carried_files),
            "index": self.index,
            "tensor_list_sha256": self.tensor_list_sha256,
            "seed": self.seed,
        }
        defaults: dict[str, object] = {
            "packed_signs": [],
            "unpadded_bias": [],
            "replaced_config": {},
            "carried_files": {},
        }
        return {key: value for key, value in members.items() if value is not None and value != defaults.get(key)}


class QuantizationConfig(FrozenModel):
    """The whole block. Every field is required except ``source``; unknown keys are refused."""

    # The docstring is the description in the JSON Schema. However an object is made, the rules of
    # parse_quantization_config hold, with the same errors, but a field of the wrong form is a pydantic.ValidationError.
    quant_method: Literal["espalier"]
    format_version: Literal[1]
    required_features: Annotated[tuple[Text, ...], JsonArray]
    producer: Producer
    bits: Annotated[float, Field(ge=0)]
    head_bits: Annotated[float, Field(ge=0)] | None
    codebooks: Annotated[Mapping[Text, CodebookConstants], Large, ReadOnly]
    modules: Annotated[Mapping[DottedName, ModuleSpec], Large, ReadOnly]
    expert_banks: Annotated[Mapping[DottedName, ExpertBank], Large, ReadOnly]
    ignore: Annotated[tuple[DottedName, ...], JsonArray, Large]
    source: Annotated[Source | None, NotNull()] = None

    @model_validator(mode="before")
    @classmethod
    def _check_announcements(cls, block: Any, info: ValidationInfo) -> Any:
        """Refuse what is not for this reader before a field is looked at."""
        if isinstance(block, Mapping):
            check_announcements(block, document_path(info))
        return block

    @model_validator(mode="after")
    def _check_rules(self, info: ValidationInfo) -> Self:
        """Check what no field can check alone."""
        check_codebooks(self, document_path(info))
        check_semantics(self, document_path(info))
        check_tensor_count(self, document_path(info))
        return self

    def to_json(self) -> dict[str, object]:
        """Return the JSON object, keys in the order of the specification; ``parse_quantization_config`` reads it."""
        block: dict[str, object] = {
            "quant_method": self.quant_method,
            "format_version": self.format_version,
            "required_features": list(self.required_features),
            "producer": self.producer.to_json(),
            "bits": self.bits,
            "head_bits": self.head_bits,
            "codebooks": {name: constants.to_json() for name, constants in self.codebooks.items()},
            "modules": {name: module.to_json() for name, module in self.modules.items()},
            "expert_banks": {name: bank.to_json() for name, bank in self.expert_banks.items()},
            "ignore": list(self.ignore),
        }
        if self.source is not None:
            block["source"] = self.source.to_json()
        return block


def parse_quantization_config(block: object, path: str | Path | None = None) -> QuantizationConfig:
    """Check a ``quantization_config`` block and return it as an object.

    ``block`` is parsed JSON; ``path`` is the file it came from, for error messages. The order of checks
    is fixed (``spec/config.md`` §9), so that a file of a later version is refused for its version and not
    for a key that this version does not know.

    Raises:
        SourceError: ``quant_method`` is not "espalier".
        FormatVersionError: ``format_version`` is missing or not the integer 1.
        FeatureError: ``required_features`` names anything.
        SchemaError: a key is missing, unknown or of the wrong form, or the fields contradict each other.
        CodebookError: a codebook is unknown, or stated with other constants than the specification's.
        PathError: ``source.carried_files`` names a file outside the checkpoint.
        LimitError: it calls for more tensors than a checkpoint may have.
    """
    if not isinstance(block, Mapping):
        raise SchemaError(f"{ROOT} must be a JSON object, but is {describe(block)}", path=path)
    try:
        return QuantizationConfig.model_validate(dict(block), context=Document(path))
    except ValidationError as error:
        raise schema_error(error, ROOT, path) from None


def check_announcements(block: Mapping[str, object], path: str | Path | None = None) -> None:
    """Refuse a block of another method, version or with required features, whatever else it holds.

    Raises:
        SourceError, FormatVersionError, FeatureError: as ``parse_quantization_config``.
    """
    method = block.get("quant_method")
    if method != QUANT_METHOD:
        raise SourceError(f'{ROOT}.quant_method is {describe(method)}, not "{QUANT_METHOD}"', path=path)
    check_format_version(block, path)
    features = block.get("required_features")
    if isinstance(features, list | tuple) and features:
        named = ", ".join(describe(feature) for feature in features[:3])
        raise FeatureError(
            f"{ROOT}.required_features: this reader knows no feature, but {named} is required", path=path
        )


def check_format_version(block: Mapping[str, object], path: str | Path | None = None) -> None:
    """Raise ``FormatVersionError`` unless ``format_version`` is the integer 1."""
    if "format_version" not in block:
        raise FormatVersionError(f"{ROOT}.format_version is missing; this reader knows version 1 only", path=path)
    version = block["format_version"]
    if type(version) is not int or version != FORMAT_VERSION:
        raise FormatVersionError(
            f"{ROOT}.format_version is {describe(version)}; this reader knows version 1 only", path=path
        )
