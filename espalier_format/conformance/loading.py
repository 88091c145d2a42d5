"""Finds the callables of a runtime by name: ``module:function``, ``kind=module:function``, or a module of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from espalier_format.conformance.attempt import described
from espalier_format.conformance.outcome import LEVELS, Kind
from espalier_format.conformance.suite import Decoder
from espalier_format.errors import EspalierError, UsageError


def load_decoders(
    specifications: Iterable[str], kind: str | None = None
) -> tuple[Mapping[Kind, Decoder], Mapping[Kind, str]]:
    """Import callables; returns them, and how they were named, by kind.

    A specification is ``module:function``, whose kind is ``kind``; ``kind=module:function``; or ``module``: then all of
    its callables that are named like a kind ("open", "codes", …) are taken, or, where ``kind`` is given, the one named
    so. A function may be an attribute of an object: ``module:object.method``.

    Raises:
        UsageError: a module or function is not there or cannot be imported, a kind is missing, unknown or given twice.
        EspalierError: what the import of a module raised, where it is one.
    """
    decoders: dict[Kind, Decoder] = {}
    names: dict[Kind, str] = {}
    for specification in specifications:
        stated, equals, rest = specification.partition("=")
        own_kind, path = (stated, rest) if equals else (kind, specification)
        for found, decoder, name in _load(path, own_kind):
            if found in decoders:
                raise UsageError(f"two decoders of the kind {found}", got=f"{names[found]} and {name}")
            decoders[found], names[found] = decoder, name
    return decoders, names


def _load(path: str, kind: str | None) -> list[tuple[Kind, Decoder, str]]:
    module_name, colon, attribute = path.partition(":")
    if kind is not None and kind not in LEVELS:
        raise UsageError("no such kind of decoder", expected=list(LEVELS), got=kind)
    module = _module(module_name)
    if colon:
        if kind is None:
            raise UsageError(f"say of which kind {path} is: --kind, or KIND={path}", expected=list(LEVELS))
        return [(kind, _callable(module, attribute, path), path)]
    wanted: list[Kind] = [name for name in LEVELS if kind in (None, name) and callable(vars(module).get(name))]
    if not wanted:
        raise UsageError(f"{module_name} has no function of that name", expected=kind or list(LEVELS))
    return [(name, _callable(module, name, module_name), f"{module_name}:{name}") for name in wanted]


def _module(name: str) -> ModuleType:
    if not name or not all(part.isidentifier() for part in name.split(".")):
        raise UsageError("a decoder is named module:function", got=name or "nothing")
    try:
        return import_module(name)
    except EspalierError:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a foreign module may raise anything
        raise UsageError(f"cannot import {name}: {described(error)}") from error


def _callable(module: ModuleType, attribute: str, path: str) -> Decoder:
    found: Any = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # it may be a property, or a module with a __getattr__
            raise UsageError(f"cannot find {path}: {described(error)}") from error
    if not callable(found):
        raise UsageError(f"{path} cannot be called", got=type(found).__name__)
    return cast("Decoder", found)


def see_current_folder(folder: Path | None = None) -> None:
    """Let modules of the current folder be imported, as ``python -m`` does; a console script has its own there.

    ``folder`` is what was the current one when the program began, where that may change before all is imported.
    """
    entry = "" if folder is None else str(folder)
    if entry not in sys.path and "" not in sys.path:
        sys.path.insert(0, entry)
