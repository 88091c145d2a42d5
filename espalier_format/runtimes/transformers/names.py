"""Which tensor and module of a checkpoint is which of a model, by name.

A checkpoint of a text and vision model says ``model.language_model.layers.0…`` where the text model alone says
``model.layers.0…`` or ``layers.0…``. transformers renames the tensors that it loads; what replaces modules before has
to find them. Names are compared without the wrappers at their beginning. A wrong guess cannot go unnoticed: the tensor
would then be missing in transformers' own account of what it loaded (`loading`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import nn

_WRAPPERS: Final = frozenset({"model", "language_model"})


def canonical(name: str) -> str:
    """Return a name without the wrappers at its beginning; one that is nothing but wrappers stays as it is."""
    parts = name.split(".")
    first = next((number for number, part in enumerate(parts) if part not in _WRAPPERS), 0)
    return ".".join(parts[first:])


class ModelNames:
    """The names of a model, found by those of a checkpoint."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._by_canonical: dict[str, str | None] = {}
        for name in self._names:
            key = canonical(name)
            self._by_canonical[key] = None if key in self._by_canonical else name

    def find(self, name: str) -> str | None:
        """Return the name in the model, None where there is none or more than one."""
        return name if name in self._names else self._by_canonical.get(canonical(name))


class IgnoredNames:
    """What a model class has no place for, and says so: e.g. vision and MTP tensors where it is the text model only.

    That is what its ``_keys_to_ignore_on_load_unexpected`` matches, as transformers uses it, and the head where a model
    has none.
    """

    def __init__(self, model: nn.Module) -> None:
        patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._expressions = [re.compile(pattern) for pattern in patterns]
        outputs = getattr(model, "get_output_embeddings", None)
        self._without_head = outputs is None or outputs() is None

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        if self._without_head and canonical(name).startswith("lm_head."):
            return True
        return any(expression.search(name) for expression in self._expressions)
