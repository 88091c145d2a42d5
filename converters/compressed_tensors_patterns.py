"""Targets and ignore lists of compressed-tensors: exact names, classes, and ``re:`` expressions from a file.

The expressions are run on every module, and nobody has checked them: one whose time can explode is refused, and so is a
list that takes too long altogether.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Final

from espalier_format.checkpoint.components import Component, component_of
from espalier_format.errors import LimitError, SchemaError, SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

CLASS_RANK: Final = 1
"""What ``Names.rank`` returns for a class; expressions rank higher, and exact names highest."""

_EXPRESSION_RANK: Final = 3
_EXACT_RANK: Final = 5
_PREFIX: Final = "re:"
_MAX_ENTRIES: Final = 200_000
_MAX_EXPRESSIONS: Final = 4096
_MAX_LENGTH: Final = 2048
_MAX_REPEATS: Final = 4
_LONGEST_MATCHED: Final = 256
_MAX_SECONDS: Final = 60.0
_CLASS: Final = re.compile(r"[A-Z][A-Za-z0-9_]*")
_LINEAR: Final = frozenset({"Linear", "LinearBase", "ReplicatedLinear"})
_SPELLINGS: Final = ("model.language_model.", "language_model.model.", "model.")
"""Prefixes of one and the same decoder: names in a config come from the model in memory, which may spell others."""


@dataclass(slots=True)
class _Clock:
    """The time that the expressions of one list have taken, which is limited."""

    where: str
    path: Path
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.seconds += seconds
        if self.seconds > _MAX_SECONDS:
            raise LimitError(f"{self.where} takes too long to match", path=self.path, expected=f"{_MAX_SECONDS:g} s")


@dataclass(frozen=True, slots=True, eq=False)
class _Expression:
    entry: str
    pattern: re.Pattern[str]
    clock: _Clock

    def matches(self, module: str) -> bool:
        """Tell whether a name begins with a match; one that is very long has none."""
        if len(module) > _LONGEST_MATCHED:
            return False
        started = perf_counter()
        found = self.pattern.match(module) is not None
        self.clock.add(perf_counter() - started)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Names:
    """A list of targets or of ignored modules."""

    entries: tuple[str, ...]
    exact: frozenset[str]
    expressions: tuple[_Expression, ...]
    classes: frozenset[str]

    @classmethod
    def parse(cls, entries: object, where: str, path: Path) -> Names:
        """Read a JSON list.

        Raises:
            SchemaError: it is no list of strings, or an expression is not valid.
            SourceError: an expression may take too long.
            LimitError: there are too many entries, or one is too long.
        """
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            raise SchemaError(f"{where} must be a list of strings", path=path)
        if len(entries) > _MAX_ENTRIES:
            raise LimitError(f"{where} has too many entries", path=path, expected=_MAX_ENTRIES, got=len(entries))
        entries = list(dict.fromkeys(entries))
        expressions = [entry for entry in entries if entry.startswith(_PREFIX)]
        if len(expressions) > _MAX_EXPRESSIONS:
            message = f"{where} has too many expressions"
            raise LimitError(message, path=path, expected=_MAX_EXPRESSIONS, got=len(expressions))
        clock = _Clock(where, path)
        compiled = tuple(_Expression(entry, _compiled(entry, where, path), clock) for entry in expressions)
        others = [entry for entry in entries if not entry.startswith(_PREFIX)]
        classes = frozenset(entry for entry in others if _CLASS.fullmatch(entry))
        return cls(tuple(entries), frozenset(others) - classes, compiled, classes)

    def rank(self, module: str) -> int:
        """Return how specifically a linear module is named: 0 not at all, more for more specific."""
        if module in self.exact:
            return _EXACT_RANK
        if any(expression.matches(module) for expression in self.expressions):
            return _EXPRESSION_RANK
        for other in spellings(module):
            if other in self.exact:
                return _EXACT_RANK - 1
            if any(expression.matches(other) for expression in self.expressions):
                return _EXPRESSION_RANK - 1
        if self.classes & _LINEAR or ("Embedding" in self.classes and component_of(module) is Component.EMBEDDINGS):
            return CLASS_RANK
        return 0

    def named(self, module: str) -> bool:
        """Tell whether a module is named by an exact name or an expression, not only by its class."""
        return self.rank(module) > CLASS_RANK

    def idle(self, modules: Iterable[str]) -> Iterator[str]:
        """Yield the names and expressions, not classes, that match none of ``modules``, in order."""
        candidates: dict[str, None] = {}
        for module in modules:
            candidates[module] = None
            candidates.update(dict.fromkeys(spellings(module)))
        expressions = {expression.entry: expression for expression in self.expressions}
        for entry in self.entries:
            if entry in self.classes:
                continue
            expression = expressions.get(entry)
            if expression is None:
                if entry not in candidates:
                    yield entry
            elif not any(expression.matches(module) for module in candidates):
                yield entry


def spellings(module: str) -> tuple[str, ...]:
    """Return other names by which a model in memory may call a module of the checkpoint."""
    for prefix in _SPELLINGS:
        if module.startswith(prefix):
            rest = module[len(prefix) :]
            return tuple(f"{other}{rest}" for other in _SPELLINGS if other != prefix)
    return ()


def _compiled(entry: str, where: str, path: Path) -> re.Pattern[str]:
    pattern = entry[len(_PREFIX) :]
    if len(pattern) > _MAX_LENGTH:
        raise LimitError(f"{where} has an expression that is too long", path=path, expected=_MAX_LENGTH)
    if _may_explode(pattern):
        raise SourceError(f"{where}: the expression {pattern[:80]!a} may take too long to match", path=path)
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise SchemaError(f"{where}: {pattern[:80]!a} is no valid expression: {error}", path=path) from error


def _may_explode(pattern: str) -> bool:
    """Tell whether a repeated group has a repeat or a choice in it, or there are many repeats one after the other."""
    text = re.sub(r"\\.", "x", pattern, flags=re.DOTALL)  # escaped characters, then sets, stand for one character
    text = re.sub(r"\[\^?\]?[^\]]*\]", "x", text)
    text = re.sub(r"\(\?(?:[:=!>]|<[=!]|P<\w+>|[a-zA-Z-]+[:)])", "(", text)
    depth: list[bool] = []
    repeats = 0
    for position, character in enumerate(text):
        repeated = text[position + 1 : position + 2] in ("*", "+", "{") and position + 1 < len(text)
        if character == "(":
            depth.append(False)
        elif character == "|" and depth:
            depth[-1] = True
        elif character == ")" and depth:
            inner = depth.pop()
            if inner and repeated:
                return True
            if depth:
                depth[-1] = depth[-1] or inner
        elif character in "*+{":
            repeats += 1
            if depth:
                depth[-1] = True
    return repeats > _MAX_REPEATS
