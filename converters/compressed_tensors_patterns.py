"""Targets and ignore lists of compressed-tensors: exact names, classes, and ``re:`` expressions from a file.

The expressions are run on every module, and nobody has checked them: one that may take too many steps is refused, and
so is a list that takes too long altogether.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Final

from espalier_format.checkpoint.components import Component, component_of
from espalier_format.converters.expression import NotUnderstoodError, parse, required_literal
from espalier_format.converters.expression_steps import most_steps
from espalier_format.errors import LimitError, SchemaError, SourceError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from pathlib import Path

CLASS_RANK: Final = 2
"""What ``Names.rank`` returns for a class; expressions rank higher, and exact names highest."""

_EMBEDDING_RANK: Final = 1
"""Of an embedding that only a class of linear layers could mean: "Embedding" is its own, but names tell no classes."""

_EXPRESSION_RANK: Final = 4
_EXACT_RANK: Final = 6
_PREFIX: Final = "re:"
_MAX_ENTRIES: Final = 200_000
_MAX_EXPRESSIONS: Final = 4096
_MAX_LENGTH: Final = 2048
_MOST_STEPS: Final = 100_000_000
"""An expression may take this many on one name, at most: a few seconds."""

_LONGEST_MATCHED: Final = 256
"""Longest name that an expression is run on; a longer one has no match."""

_LEAST_MATCHED: Final = 64
"""An expression that may take too long on names of this length is refused, whatever names there are."""

_BATCH: Final = 4096
_BATCH_STEPS: Final = 200_000_000
"""The clock is read after at most as many steps, but after a name at least."""

_MAX_SECONDS: Final = 60.0
_CLASS: Final = re.compile(r"[A-Z][A-Za-z0-9_]*")
_LINEAR: Final = frozenset({"Linear", "LinearBase", "ReplicatedLinear"})
_SPELLINGS: Final = ("model.language_model.", "language_model.model.", "model.")
"""Prefixes of one and the same decoder: names in a config come from the model in memory, which may spell others."""

_OTHER_SPELLINGS: Final = tuple((prefix, tuple(p for p in _SPELLINGS if p != prefix)) for prefix in _SPELLINGS)

Spelled = Mapping[str, tuple[str, ...]]
"""Modules, with the other names that each may have; see `spell`."""


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
    literal: str
    """A text in every match: looking for it is ten times as fast as matching."""
    longest: int
    """Characters of the longest name that it takes at most `_MOST_STEPS` on."""
    batch: int
    """How many names may be matched until the clock is read."""

    @classmethod
    def parse(cls, entry: str, where: str, clock: _Clock) -> _Expression:
        started = perf_counter()
        text = entry[len(_PREFIX) :]
        if len(text) > _MAX_LENGTH:
            raise LimitError(f"{where} has an expression that is too long", path=clock.path, expected=_MAX_LENGTH)
        try:
            choice = parse(text)
            pattern = re.compile(text)
            literal = required_literal(choice)
            lengths = range(_LEAST_MATCHED, _LONGEST_MATCHED + 1)
            fitting = bisect_right(lengths, _MOST_STEPS, key=lambda length: most_steps(choice, length))
            steps = most_steps(choice, lengths[max(fitting - 1, 0)])
        except NotUnderstoodError as error:
            message = f"{where}: the expression {text[:80]!a} has what is not supported: {error}"
            raise SourceError(message, path=clock.path) from error
        except (re.error, OverflowError, RecursionError) as error:
            raise SchemaError(f"{where}: {text[:80]!a} is no valid expression: {error}", path=clock.path) from error
        if fitting == 0:
            raise SourceError(f"{where}: the expression {text[:80]!a} may take too long to match", path=clock.path)
        clock.add(perf_counter() - started)
        return cls(entry, pattern, clock, literal, lengths[fitting - 1], max(1, min(_BATCH, _BATCH_STEPS // steps)))

    def matching(self, names: Sequence[str]) -> set[str]:
        """Return those of ``names`` that begin with a match."""
        candidates = [name for name in names if self.literal in name] if self.literal else names
        long = [name for name in candidates if len(name) > self.longest] if self.longest < _LONGEST_MATCHED else []
        if long:
            message = f"{self.clock.where}: the expression {self.entry[:80]!a} may take too long on a long name"
            expected = f"names of at most {self.longest} characters"
            raise SourceError(message, path=self.clock.path, expected=expected, got=long[0])
        found: set[str] = set()
        for start in range(0, len(candidates), self.batch):
            started = perf_counter()
            found.update(filter(self.pattern.match, candidates[start : start + self.batch]))
            self.clock.add(perf_counter() - started)
        return found

    def matches_any(self, names: Sequence[str]) -> bool:
        """Tell whether any of ``names`` begins with a match; nothing is looked at after the first."""
        return any(self.matching(names[start : start + _BATCH]) for start in range(0, len(names), _BATCH))


@dataclass(frozen=True, slots=True, eq=False)
class Names:
    """A list of targets or of ignored modules."""

    entries: tuple[str, ...]
    exact: frozenset[str]
    expressions: tuple[_Expression, ...]
    classes: frozenset[str]
    _ranks: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def parse(cls, entries: object, where: str, path: Path) -> Names:
        """Read a JSON list.

        Raises:
            SchemaError: it is no list of strings, or an expression is not valid.
            SourceError: an expression may take too long, or has what is not supported.
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
        compiled = tuple(_Expression.parse(entry, where, clock) for entry in expressions)
        others = [entry for entry in entries if not entry.startswith(_PREFIX)]
        classes = frozenset(entry for entry in others if _CLASS.fullmatch(entry))
        return cls(tuple(entries), frozenset(others) - classes, compiled, classes)

    def rank(self, module: str) -> int:
        """Return how specifically a linear module is named: 0 not at all, more for more specific."""
        rank = self._ranks.get(module)
        if rank is None:
            self.prepare(spell((module,)))
            rank = self._ranks[module]
        return rank

    def prepare(self, spelled: Spelled) -> frozenset[str]:
        """Find the ranks of many modules at once, and return the expressions that match any of them.

        ``rank`` is quick for them afterwards: an expression that is run on all names in turn takes a tenth of the time.
        """
        names = [module for module in spelled if len(module) <= _LONGEST_MATCHED]
        others = [other for same in spelled.values() for other in same if len(other) <= _LONGEST_MATCHED]
        direct: set[str] = set()
        indirect: set[str] = set()
        live: set[str] = set()
        for expression in self.expressions:
            here, there = expression.matching(names), expression.matching(others)
            if here or there:
                live.add(expression.entry)
            direct |= here
            indirect |= there
        linear = bool(self.classes & _LINEAR)
        by_class = CLASS_RANK if linear else 0
        embedding = CLASS_RANK if "Embedding" in self.classes else _EMBEDDING_RANK if linear else 0
        for module, same in spelled.items():
            if module in self.exact:
                rank = _EXACT_RANK
            elif module in direct:
                rank = _EXPRESSION_RANK
            else:
                rank = by_class
                if embedding != by_class and component_of(module) is Component.EMBEDDINGS:
                    rank = embedding
                for other in same:
                    if other in self.exact or other in indirect:
                        rank = (_EXACT_RANK if other in self.exact else _EXPRESSION_RANK) - 1
                        break
            self._ranks[module] = rank
        return frozenset(live)

    def named(self, module: str) -> bool:
        """Tell whether a module is named by an exact name or an expression, not only by its class."""
        return self.rank(module) > CLASS_RANK

    def idle(self, spelled: Spelled, live: Collection[str] | None = None) -> Iterator[str]:
        """Yield the names and expressions, not classes, that match none of the modules, in order.

        ``live`` are the expressions that match, where ``prepare`` has told that.
        """
        if live is None:
            names = [name for name in _all_names(spelled) if len(name) <= _LONGEST_MATCHED]
            live = {expression.entry for expression in self.expressions if expression.matches_any(names)}
        used = set(live)
        if self.exact:
            used.update(self.exact.intersection(_all_names(spelled)))
        yield from (entry for entry in self.entries if entry not in used and entry not in self.classes)


def spell(modules: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return, for each module, the other names by which a model in memory may call it.

    What sees or hears stands beside the decoder, and shares none of the names of its parts.
    """
    spelled: dict[str, tuple[str, ...]] = dict.fromkeys(modules, ())
    decoder = [module for module in spelled if component_of(module) is not Component.VISION]
    for prefix, others in reversed(_OTHER_SPELLINGS):  # the first prefix that a name begins with has the last word
        found = [module for module in decoder if module.startswith(prefix)]
        rests = [module[len(prefix) :] for module in found]
        columns = [[f"{other}{rest}" for rest in rests] for other in others]
        spelled.update(zip(found, zip(*columns, strict=True), strict=True))
    return spelled


def _all_names(spelled: Spelled) -> Iterator[str]:
    yield from spelled
    for same in spelled.values():
        yield from same
