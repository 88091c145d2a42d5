"""Weights that say how much the error of a module matters: a file from a calibration, or from a person."""

from __future__ import annotations

import math
import tomllib
from typing import TYPE_CHECKING, Any, Final

from espalier_format.container.json_document import parse_json
from espalier_format.container.regular_file import read_regular
from espalier_format.errors import SchemaError, UsageError
from espalier_format.quantize.recipe import compile_pattern

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
    data = read_regular(path, _MAX_BYTES)
    document: Any
    if path.suffix == ".toml":
        try:
            document = tomllib.loads(data.decode("utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SchemaError(f"not a TOML document: {error}", path=path) from None
    else:
        document = parse_json(data, path=path)
    if not isinstance(document, dict):
        raise SchemaError("must be a table of patterns and weights", path=path)
    for pattern, weight in document.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            hint = "; in TOML a name with dots must be quoted" if isinstance(weight, dict) else ""
            raise SchemaError(f"the weight of {pattern!a} must be a finite number of at least 0{hint}", path=path)
    return {pattern: float(weight) for pattern, weight in document.items()}


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
