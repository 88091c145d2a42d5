"""Compile kernels with NVRTC, for any architecture, on machines without a GPU too.

A kernel is a ``.cu`` file of this package, specialised by macros. It includes no header but those beside it: the
compiler alone is enough, and its text is the whole input, so that compiled code can be kept under a hash of it.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import stat
import threading
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from espalier_format.errors import DependencyError, UsageError

if TYPE_CHECKING:
    from cuda.core import ProgramOptions
    from cuda.core.utils import FileStreamProgramCache

ARCHITECTURES: Final = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")
"""The architectures that every kernel is compiled for in the tests. Others from sm_80 on work as well."""

CACHE_VARIABLE: Final = "ESPALIER_KERNEL_CACHE"
"""Environment variable: the folder where compiled kernels are kept, instead of the user's cache folder."""


class Variant(NamedTuple):
    """One way in which a kernel is compiled. Every operation's module lists its own: ``variants()``."""

    kernel: str
    """Name of the ``.cu`` file."""
    symbols: tuple[str, ...]
    """Functions that are taken from it."""
    macros: Mapping[str, int | str]


_UNUSED_VARIABLE: Final = 177
"""The warning that is not given: a kernel need not use all constants of the headers it shares."""
_OPTIONS: Final = MappingProxyType({"std": "c++17", "diag_suppress": _UNUSED_VARIABLE})
"""What every kernel is compiled with."""

_CACHE_BYTES: Final = 256 << 20
_LOGGER: Final = logging.getLogger(__name__)
_import_lock: Final = threading.Lock()
_cache_lock: Final = threading.Lock()
_imported: Final[list[Any]] = []
"""The module ``cuda.core``, once it has been needed."""
_INCLUDE: Final = re.compile(r'^#include "([\w.]+)"[^\n]*$', re.MULTILINE)
_GENERATED: Final = "grids.cuh"
"""Included like a file, made from the specification's grids.json."""


@cache
def kernel_source(name: str) -> str:
    """Return the text of ``<name>.cu`` with every header of this package written out in its place, once."""
    seen: set[str] = set()

    def expand(file: str) -> str:
        if file in seen:
            return ""
        seen.add(file)
        if file == _GENERATED:
            return _grid_tables()
        text = (resources.files("espalier_format.kernels") / "cuda" / file).read_text(encoding="utf-8")
        return _INCLUDE.sub(lambda match: expand(match[1]), text)

    return expand(f"{name}.cu")


def compile_cubin(name: str, macros: Mapping[str, int | str], architecture: str, *, anew: bool = False) -> bytes:
    """Compile ``<name>.cu`` with these macros for an architecture such as "sm_90", and return the cubin.

    The result is kept on disk, in a folder of the user's own, and found there by later calls and processes: the key
    covers the text, the macros, the options, the architecture and the versions of this package and of the compiler. A
    folder that others may write to or replace, or that cannot be written, is not used. With ``anew`` what is kept is
    not looked at but replaced. Safe to call from several threads and processes.

    Raises DependencyError where cuda-core or NVRTC is not installed, and UsageError, with the compiler's words, when
    the kernel does not compile.
    """
    source = kernel_source(name)
    key = _cache_key(source, name, macros, architecture)
    with _cache_lock:  # opened once, with one warning where it cannot be
        kept = _open_cache()
    if kept is not None:
        with suppress(KeyError, OSError):
            if not anew:
                return bytes(kept[key])
            del kept[key]
    cubin, _ = compile_text(source, name, macros, architecture)
    if kept is not None:
        with suppress(OSError):
            kept[key] = cubin
    return cubin


def compile_text(source: str, name: str, macros: Mapping[str, int | str], architecture: str) -> tuple[bytes, str]:
    """Compile the text of a kernel, without looking for a kept result; return the cubin and the compiler's remarks.

    The remarks are empty for a kernel without warnings. Raises as `compile_cubin`.
    """
    core = cuda_core()
    options = _options(core, name, macros, architecture)
    log = io.StringIO()
    try:
        code = core.Program(source, "c++", options=options).compile("cubin", logs=log).code
    except Exception as error:  # cuda-core has its own error; a missing library shows as RuntimeError
        reason = str(error).strip(" \n\x00") or type(error).__name__
        if "libnvrtc" in reason:
            raise DependencyError('kernels need NVRTC: pip install "cuda-core[cu13]"') from error
        raise UsageError(f"{name}.cu does not compile for {architecture}: {reason}") from error
    return bytes(code), log.getvalue().strip(" \n\x00")


def cuda_core() -> Any:
    """Return the module ``cuda.core``; raise DependencyError where it is not installed."""
    if not _imported:
        # One thread at a time, and only once: another one would find a module that is half made, and the filters of
        # warnings are those of all threads.
        with _import_lock:
            if not _imported:
                _imported.append(_import_core())
    return _imported[0]


def _import_core() -> Any:
    try:
        with warnings.catch_warnings():
            # cuda-core warns about a driver or bindings that are older than it; they are good enough for what is used.
            warnings.simplefilter("ignore")
            import cuda.core  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise DependencyError('CUDA kernels need cuda-core: pip install "cuda-core[cu13]"') from error
    return cuda.core


def _options(core: Any, name: str, macros: Mapping[str, int | str], architecture: str) -> ProgramOptions:
    pairs = [(macro, str(value)) for macro, value in sorted(macros.items())]
    options: ProgramOptions = core.ProgramOptions(name=name, arch=architecture, define_macro=pairs or None, **_OPTIONS)
    return options


def _cache_key(source: str, name: str, macros: Mapping[str, int | str], architecture: str) -> bytes:
    defined = sorted((macro, str(value)) for macro, value in macros.items())
    parts = [source, name, defined, sorted(_OPTIONS.items()), architecture, *_versions()]
    return hashlib.sha256(json.dumps(parts).encode()).digest()


@cache
def _versions() -> tuple[str, ...]:
    """Name this package and the compiler, from metadata: to load NVRTC and ask would take a tenth of a second."""
    found = []
    for package in ("espalier-format", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "cuda-core"):
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    if not any("nvrtc" in name for name in found):
        cuda_core()
        from cuda.bindings import nvrtc  # noqa: PLC0415 - an optional dependency

        with suppress(RuntimeError):
            found.append(str(nvrtc.nvrtcVersion()))
    return tuple(found)


@cache
def _open_cache() -> FileStreamProgramCache | None:
    """Return the cache, or None where its folder is not the user's alone or cannot be made."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(os.environ.get(CACHE_VARIABLE) or f"{base}/espalier-format/kernels")
    cuda_core()
    from cuda.core.utils import FileStreamProgramCache  # noqa: PLC0415 - as above

    try:
        # What is checked is what is used, wherever links lead later. A user without a home has no "~": RuntimeError.
        folder = folder.expanduser().resolve()
        for made in (*reversed(folder.parents), folder):
            made.mkdir(exist_ok=True, mode=0o700)
        if _is_private(folder):
            return FileStreamProgramCache(folder, max_size_bytes=_CACHE_BYTES)
        reason = "others can write to it, so that its code could be theirs"
    except (OSError, RuntimeError) as error:
        reason = str(error)
    _LOGGER.warning(
        "compiled kernels are not kept in %s (%s): every process compiles them anew; %s names another folder",
        folder, reason, CACHE_VARIABLE,
    )  # fmt: skip
    return None


def _is_private(folder: Path) -> bool:
    """Tell whether nobody else, root aside, can write to a folder, or put another one in its place."""
    status = folder.stat()
    others = stat.S_IWGRP | stat.S_IWOTH
    if status.st_uid != os.getuid() or status.st_mode & others:
        return False
    above = [parent.stat() for parent in folder.parents]
    # In a sticky folder, such as /tmp, only the owner of what is in it may rename it.
    return all(
        parent.st_uid in (0, os.getuid()) and (not parent.st_mode & others or parent.st_mode & stat.S_ISVTX)
        for parent in above
    )


@cache
def _grid_tables() -> str:
    """Write the tables of the grid codebooks (spec/grids.json) as device constants, each under its family's macro."""
    grids = json.loads((resources.files("espalier_format.spec") / "grids.json").read_text(encoding="utf-8"))
    lines = []
    for family, grid in grids.items():
        codes = ",".join(map(str, grid["table"]))
        lines += [f"#if FAMILY == FAMILY_{family.upper()}"]
        lines += [f"static __device__ const signed char GRID_CODES[{len(grid['table'])}] = {{{codes}}};", "#endif"]
    return "\n".join(lines)
