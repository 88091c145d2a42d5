"""How tensors of a Hugging Face checkpoint are made of stored ones: value objects of the layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Stored:
    """One stored matrix (out, in), vector or other tensor at its true size.

    ``name`` is a module if ``quantized``, otherwise the full name of a plain tensor, of which the first
    ``shape[0]`` rows are meant (the bias of a padded module is longer).
    """

    name: str
    shape: tuple[int, ...]
    quantized: bool


Row = tuple[Stored, ...]
"""Matrices side by side along ``in``; one, unless the module was sliced along ``in``."""


@dataclass(frozen=True, slots=True)
class HfTensor:
    """One tensor to write: ``pages`` in order, each the stack of its rows along ``out``, transposed if so stated."""

    name: str
    shape: tuple[int, ...]
    pages: tuple[tuple[Row, ...], ...]
    transposed: bool = False

    def sources(self) -> Iterator[Stored]:
        """Yield everything stored that this tensor is made of."""
        for page in self.pages:
            for row in page:
                yield from row


@dataclass(frozen=True, slots=True)
class HfLayout:
    """All tensors to write, in no particular order; ``warnings`` are lines for a person."""

    tensors: tuple[HfTensor, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoredModule:
    """A quantized module as the planner sees it: true sizes and the full name of its bias tensor."""

    in_features: int
    out_features: int
    bias: str | None = None
