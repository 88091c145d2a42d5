"""The experts of one mixture-of-experts layer, each with a width of its own (spec/config.md §5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from espalier_format.limits import MAX_CONFIG_STRING_BYTES
from espalier_format.schema.base import FrozenModel, JsonArray, Large, ReadOnly, SimpleName, Size, Text

ASSIGNMENT_ALPHABET: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
"""Character *i* of the alphabet stands for entry *i* of a projection's ``codebooks``."""

PLAIN_EXPERT: Final = "-"
"""The ``assignment`` character of an expert whose projection is stored as a plain ``.weight``."""


def _refuse_equals(value: object) -> object:
    # A Literal alone would take what equals one of its values: False is 0, and 128.0 is 128.
    if type(value) is not int:
        raise PydanticCustomError("block", "must be one of the integers 0, 32, 64, 128 and 256")
    return value


Block = Annotated[Literal[0, 32, 64, 128, 256], BeforeValidator(_refuse_equals)]
SizeSource = Literal["exact", "padded"]


class Rotation(FrozenModel):
    """Hadamard block sizes of the two sides of a weight; 0 means not rotated (``spec/rotation.md``)."""

    in_: Block = Field(alias="in")
    out: Block

    @classmethod
    def of(cls, inputs: int, outputs: int) -> Self:
        """Return the rotation with these blocks: Python has no keyword argument ``in``.

        Raises ``pydantic.ValidationError`` for a block that does not exist.
        """
        return cls.model_validate({"in": inputs, "out": outputs})

    def to_json(self) -> dict[str, object]:
        """Return the JSON object."""
        return {"in": self.in_, "out": self.out}


class Projection(FrozenModel):
    """One projection of all experts of a bank.

    ``in_features`` and ``out_features`` are the sizes without padding of every expert of the bank.
    ``assignment`` has one character per expert: ``0-9a-z`` indexes ``codebooks``, ``-`` says that the
    expert is stored plain.
    """

    in_features: Size
    out_features: Size
    rotation: Rotation
    size_source: SizeSource
    codebooks: Annotated[
        tuple[Text, ...],
        JsonArray,
        Field(min_length=1, max_length=len(ASSIGNMENT_ALPHABET), json_schema_extra={"uniqueItems": True}),
    ]
    assignment: Annotated[str, Field(pattern=r"^[0-9a-z-]+$")]

    def expert_codebooks(self) -> list[str | None]:
        """Return the codebook name of each expert, None where it is stored plain.

        The assignment must have passed ``parse_quantization_config``, which checks every index.
        """
        names: dict[str, str | None] = dict(zip(ASSIGNMENT_ALPHABET, self.codebooks, strict=False))
        names[PLAIN_EXPERT] = None
        return [names[character] for character in self.assignment]

    def experts_per_codebook(self) -> dict[str, int]:
        """Return codebook name → number of experts; those stored plain are not counted."""
        characters = zip(ASSIGNMENT_ALPHABET, self.codebooks, strict=False)
        return {codebook: self.assignment.count(character) for character, codebook in characters}

    def to_json(self) -> dict[str, object]:
        """Return the JSON object, keys in the order of the specification."""
        return {
            "in_features": self.in_features,
            "out_features": self.out_features,
            "rotation": self.rotation.to_json(),
            "size_source": self.size_source,
            "codebooks": list(self.codebooks),
            "assignment": self.assignment,
        }


class ExpertBank(FrozenModel):
    """All experts of one layer; tensors are ``<bank>.<expert>.<projection>.esp_*``, experts 0 to num_experts - 1."""

    # An assignment has one character per expert, and no string is longer.
    num_experts: Annotated[int, Field(ge=1, le=MAX_CONFIG_STRING_BYTES)]
    projections: Annotated[Mapping[SimpleName, Projection], Field(min_length=1), Large, ReadOnly]

    def to_json(self) -> dict[str, object]:
        """Return the JSON object, keys in the order of the specification."""
        return {
            "num_experts": self.num_experts,
            "projections": {name: projection.to_json() for name, projection in self.projections.items()},
        }
