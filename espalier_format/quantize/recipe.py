"""Recipes: ordered rules that say which linear modules are quantized, and how; read from TOML."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from espalier_format.checkpoint.components import Component, component_of
from espalier_format.codec.codebook import Codebook, get_codebook
from espalier_format.codec.rotation import BLOCKS
from espalier_format.errors import CodebookError, SchemaError
from espalier_format.quantize.toml_document import read_toml

MAX_RECIPE_BYTES: Final = 1_000_000
MAX_CANDIDATES: Final = 36
"""As many codebooks as a projection of an expert bank may name."""

_RULE_KEYS: Final = frozenset({"match", "component", "codebook", "rotation", "average", "keep"})
_COMPONENTS: Final = {component.value.replace(" ", "-"): component for component in Component}


@dataclass(frozen=True)
class Rule:
    """What becomes of the modules that it matches: kept where there are no ``codebooks``.

    A module matches when one of ``patterns`` fits its whole name (shell wildcards; ``*`` also matches dots) and its
    component is one of ``components``; an empty tuple fits all. Several ``codebooks``, sorted by width, are the
    candidates of the solver; ``average`` is the mean width that these modules get where no total is asked for.
    ``rotation`` is (in, out), None where the size decides. A ``required`` rule must match something.
    """

    patterns: tuple[str, ...] = ()
    components: tuple[Component, ...] = ()
    codebooks: tuple[Codebook, ...] = ()
    rotation: tuple[int | None, int | None] = (None, None)
    average: Fraction | None = None
    required: bool = False

    def matches(self, name: str) -> bool:
        """Tell whether the rule is about the module of that name."""
        if self.components and component_of(name) not in self.components:
            return False
        return not self.patterns or any(matcher.fullmatch(name) for matcher in self._matchers)

    @cached_property
    def _matchers(self) -> tuple[re.Pattern[str], ...]:
        return tuple(compile_pattern(pattern) for pattern in self.patterns)

    def to_json(self) -> dict[str, object]:
        """Return everything that decides about the output."""
        return {
            "match": list(self.patterns),
            "component": [component.value for component in self.components],
            "codebook": [codebook.name for codebook in self.codebooks],
            "rotation": list(self.rotation),
            "average": None if self.average is None else str(self.average),
        }


@dataclass(frozen=True, slots=True)
class Recipe:
    """Rules in order: the first that matches a module decides. A module that none matches is kept."""

    name: str
    rules: tuple[Rule, ...]
    bits: float | None = None

    def rule_for(self, module: str) -> tuple[int, Rule] | None:
        """Return the first rule that matches the module of that name, with its place among the rules."""
        return next(((place, rule) for place, rule in enumerate(self.rules) if rule.matches(module)), None)


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern with shell wildcards, upper and lower case kept apart."""
    return re.compile(fnmatch.translate(pattern))


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from a TOML file.

    Raises:
        MissingFileError, SourceError, LimitError: the file cannot be read.
        SchemaError: it is no TOML, or not a recipe; the message names the rule.
        CodebookError: an unknown codebook.
    """
    return parse_recipe(read_toml(path, MAX_RECIPE_BYTES), path)


def parse_recipe(document: Mapping[str, Any], path: Path) -> Recipe:
    """Check a parsed recipe and return it; errors as `read_recipe`."""
    unknown = sorted(document.keys() - {"bits", "rule"})
    if unknown:
        raise SchemaError(f"{unknown[0]!a} is not a key of a recipe; they are bits and rule", path=path)
    bits = document.get("bits")
    if bits is not None:
        _number(bits, "bits", path)
    rules = document.get("rule")
    if not isinstance(rules, list) or not rules:
        raise SchemaError("a recipe needs at least one [[rule]]", path=path)
    parsed = tuple(_rule(rule, f"rule {number}", path) for number, rule in enumerate(rules, 1))
    return Recipe(path.name, parsed, None if bits is None else float(bits))


def _rule(rule: object, where: str, path: Path) -> Rule:
    if not isinstance(rule, dict):
        raise SchemaError(f"{where} must be a table", path=path)
    unknown = sorted(rule.keys() - _RULE_KEYS)
    if unknown:
        raise SchemaError(f"{where}: {unknown[0]!a} is not a key; they are {', '.join(sorted(_RULE_KEYS))}", path=path)
    patterns = _strings(rule.get("match", []), f"{where}: match", path)
    names = _strings(rule.get("component", []), f"{where}: component", path)
    wrong = [name for name in names if name not in _COMPONENTS]
    if wrong:
        known = ", ".join(sorted(_COMPONENTS))
        raise SchemaError(f"{where}: {wrong[0]!a} is no component; they are {known}", path=path)
    if not patterns and not names:
        raise SchemaError(f"{where} needs match or component", path=path)
    keep = rule.get("keep", False)
    if not isinstance(keep, bool):
        raise SchemaError(f"{where}: keep must be true or false", path=path)
    if keep == ("codebook" in rule):
        raise SchemaError(f"{where} needs either codebook or keep = true", path=path)
    if keep and not rule.keys().isdisjoint({"rotation", "average"}):
        raise SchemaError(f"{where}: what is kept has neither rotation nor average", path=path)
    codebooks = _codebooks(rule.get("codebook", []), where, path) if not keep else ()
    average = rule.get("average")
    if average is not None:
        _number(average, f"{where}: average", path)
        if len(codebooks) == 1:
            raise SchemaError(f"{where}: average needs more than one codebook", path=path)
    return Rule(
        patterns,
        tuple(_COMPONENTS[name] for name in names),
        codebooks,
        _rotation(rule.get("rotation"), where, path),
        None if average is None else Fraction(str(average)),
        required=True,
    )


def _strings(value: object, where: str, path: Path) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) and item for item in values):
        raise SchemaError(f"{where} must be a string or an array of strings", path=path)
    return tuple(values)


def _codebooks(value: object, where: str, path: Path) -> tuple[Codebook, ...]:
    names = _strings(value, f"{where}: codebook", path)
    if not names or len(names) > MAX_CANDIDATES:
        raise SchemaError(f"{where}: codebook must name 1 to {MAX_CANDIDATES} codebooks", path=path)
    try:
        return sorted_codebooks(get_codebook(name) for name in names)
    except CodebookError as error:
        raise CodebookError(f"{where}: {error.message}", path=path, expected=error.expected, got=error.got) from None


def sorted_codebooks(codebooks: Any) -> tuple[Codebook, ...]:
    """Return the codebooks sorted by width, then name, each once."""
    return tuple(sorted(set(codebooks), key=lambda codebook: (codebook.half_steps, codebook.name)))


def _rotation(value: object, where: str, path: Path) -> tuple[int | None, int | None]:
    if value is None:
        return None, None
    sides: Sequence[object] = (value, value)
    if isinstance(value, dict):
        if value.keys() - {"in", "out"}:
            raise SchemaError(f"{where}: rotation has the keys in and out", path=path)
        sides = (value.get("in"), value.get("out"))
    blocks: list[int | None] = []
    for side in sides:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side not in BLOCKS):
            raise SchemaError(f"{where}: rotation must be {', '.join(map(str, BLOCKS))}, or a table of them", path=path)
        blocks.append(side)
    return blocks[0], blocks[1]


def _number(value: object, where: str, path: Path) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 16:
        raise SchemaError(f"{where} must be a number of bits, above 0 and at most 16", path=path)
