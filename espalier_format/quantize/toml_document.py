"""TOML files that a person wrote: recipes and tables of weights."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any

from espalier_format.container.regular_file import read_regular
from espalier_format.errors import SchemaError

if TYPE_CHECKING:
    from pathlib import Path


def read_toml(path: Path, max_bytes: int) -> dict[str, Any]:
    """Read a TOML file of at most ``max_bytes``.

    Raises:
        SchemaError: it is no TOML, or nests too deep, or holds an integer of thousands of digits.
        MissingFileError, SourceError, LimitError: the file cannot be read.
    """
    data = read_regular(path, max_bytes)
    try:
        return tomllib.loads(data.decode("utf-8-sig"))  # some editors put a byte order mark first
    except (ValueError, RecursionError) as error:  # of the bytes, the syntax, or Python's limit of digits
        raise SchemaError(f"not a TOML document: {error}", path=path) from None
