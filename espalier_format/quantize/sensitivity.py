"""Weights that say how much the error of a module matters: a file from a calibration, or from a person."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from espalier_format.container.json_document import parse_json
from espalier_format.container.regular_file import read_regular
from espalier_format.errors import SchemaError, UsageError
from espalier_format.quantize.recipe import compile_pattern
from espalier_format.quantize.toml_document import read_toml

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

_MAX_BYTES: Final = 100_000_000
_WILDCARDS: Final = frozenset("*?[")


def read_sensitivity(path: Path) -> dict[str, float]:
    """Read a table of module names or patterns and their weights, in order, from JSON, or TOML where the name says so.

    Raises:
        SchemaError, MalformedError: it is no such table, or a weight is not a finite number of at least 0.
        MissingFileError, SourceError, LimitError: the file cannot be read.
    """
    document: Any
    if path.suffix == ".toml":
        document = read_toml(path, _MAX_BYTES)
    else:
        document = parse_json(read_regular(path, _MAX_BYTES), path=path)
    if not isinstance(document, dict):
        raise SchemaError("must be a table of patterns and weights", path=path)
    weights = {pattern: _as_weight(weight) for pattern, weight in document.items()}
    for pattern, weight in weights.items():
        if not 0 <= weight < math.inf:
            hint = "; in TOML a name with dots must be quoted" if isinstance(document[pattern], dict) else ""
            raise SchemaError(f"the weight of {pattern!a} must be a finite number of at least 0{hint}", path=path)
    return weights


def _as_weight(value: object) -> float:
    """Return the number, and NaN for what is none, or an integer that is larger than any."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def module_weights(table: Mapping[str, float], modules: Iterable[str]) -> dict[str, float]:
    """Return the weight of each module: that of the first entry that matches, or 1.

    Raises:
        UsageError: an entry matches no module at all, quantized or not.
    """
    order = {pattern: number for number, pattern in enumerate(table)}
    matchers = [(order[p], compile_pattern(p), table[p]) for p in table if not _WILDCARDS.isdisjoint(p)]
    used: set[int] = set()
    weights: dict[str, float] = {}
    for module in modules:
        found = [(number, weight) for number, matcher, weight in matchers if matcher.fullmatch(module)]
        if module in table:
            found.append((order[module], table[module]))
        used.update(number for number, _ in found)
        weights[module] = min(found)[1] if found else 1.0
    for pattern, number in order.items():
        if number not in used:
            raise UsageError(f"sensitivity: no linear module matches {pattern[:60]!r}")
    return weights
