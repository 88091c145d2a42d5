"""The specification, as files that ship with the package.

`names` lists them and `read_text` gives one: pages (``packing.md``), frozen data (``grids.json``), JSON
Schemas, and known answers (``vectors/tiles.json``). Start at ``README.md``.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Final

from espalier_format.errors import MissingFileError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = ["CONFIG_SCHEMA", "MANIFEST_SCHEMA", "names", "read_text"]

CONFIG_SCHEMA: Final = "espalier-v1.config.schema.json"
"""Name of the JSON Schema of ``quantization_config``."""

MANIFEST_SCHEMA: Final = "espalier-v1.manifest.schema.json"
"""Name of the JSON Schema of the manifest."""

_SUFFIXES: Final = (".md", ".json")
_FOLDERS: Final = ("vectors",)


@lru_cache(maxsize=1)
def names() -> tuple[str, ...]:
    """Return the names of all files of the specification, sorted; those of vectors begin with ``vectors/``."""
    root = _root()
    found = _files(root, "")
    for folder in _FOLDERS:
        found += _files(root / folder, f"{folder}/")
    return tuple(sorted(found))


def read_text(name: str) -> str:
    """Return the text of one file, as `names` spells it.

    Raises:
        MissingFileError: the specification has no such file.
    """
    if name not in names():
        raise MissingFileError(f"the specification has no file {name!r}")
    return _root().joinpath(*name.split("/")).read_text(encoding="utf-8")


def _root() -> Traversable:
    return resources.files("espalier_format.spec")


def _files(folder: Traversable, prefix: str) -> list[str]:
    return [prefix + entry.name for entry in folder.iterdir() if entry.is_file() and entry.name.endswith(_SUFFIXES)]
