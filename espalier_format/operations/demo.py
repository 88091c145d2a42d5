"""``demo``: a small real EXL3 checkpoint to Espalier and back, and proof that every byte is the same."""

from __future__ import annotations

import hashlib
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final

from espalier_format.container.names import MANIFEST_NAME
from espalier_format.errors import OutputExistsError, WriteError
from espalier_format.operations.convert import convert_checkpoint
from espalier_format.operations.inspect import inspect_checkpoint
from espalier_format.operations.verify import verify_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from espalier_format.converters.report import ConversionReport
    from espalier_format.operations.inspect_report import InspectReport
    from espalier_format.operations.verify_report import VerifyReport

CHECKPOINT: Final = "llama-3.0-mcg"
"""Name of the checkpoint in ``demo_data``; its PROVENANCE.md says how exllamav3 made it."""

ORIGINAL: Final = "exl3"
ESPALIER: Final = "espalier"
BACK: Final = "exl3-again"


@dataclass(frozen=True, slots=True)
class ComparedFile:
    """One file of the original and of what came back; ``None`` where it is missing."""

    name: str
    size: int
    sha256: str | None
    sha256_back: str | None

    @property
    def identical(self) -> bool:
        """Whether both are there and have one SHA-256."""
        return self.sha256 is not None and self.sha256 == self.sha256_back


@dataclass(frozen=True, slots=True)
class DemoStep:
    """One command of the demo, already run: the words after the program's name, and what it returned."""

    title: str
    command: tuple[str, ...]
    result: InspectReport | ConversionReport | VerifyReport | tuple[ComparedFile, ...]


def run_demo(keep: Path | None = None) -> Iterator[DemoStep]:
    """Run the demo and yield each step when it is done; the last compares all files.

    The three checkpoints are folders of a temporary folder, or with ``keep`` of that one, which must be new or
    empty and stays. Needs neither torch nor the network.

    Raises:
        OutputExistsError: ``keep`` is not empty.
        WriteError: the operating system refuses.
    """
    with _workplace(keep) as folder:
        original, espalier, back = folder / ORIGINAL, folder / ESPALIER, folder / BACK
        _unpack(original)
        yield DemoStep("A checkpoint that exllamav3 wrote", ("inspect", ORIGINAL), inspect_checkpoint(original))
        to_espalier = ("convert", ORIGINAL, ESPALIER, "--to", "espalier", "--digests")
        yield DemoStep("To Espalier", to_espalier, convert_checkpoint(original, espalier, to="espalier", digests=True))
        yield DemoStep("What it holds now", ("inspect", ESPALIER), inspect_checkpoint(espalier))
        yield DemoStep("Is all of it right?", ("verify", ESPALIER, "--deep"), verify_checkpoint(espalier, deep=True))
        yield DemoStep(
            "And back", ("convert", ESPALIER, BACK, "--to", "exl3"), convert_checkpoint(espalier, back, to="exl3")
        )
        yield DemoStep("Compare", ("sha256sum", f"{ORIGINAL}/*", f"{BACK}/*"), _compare(original, back))


def _unpack(destination: Path) -> None:
    """Copy the shipped checkpoint out of the package, wherever the package lies (a zip file, say)."""
    try:
        destination.mkdir()
        for resource in (files("espalier_format") / "demo_data" / CHECKPOINT).iterdir():
            if resource.is_file():
                (destination / resource.name).write_bytes(resource.read_bytes())
    except OSError as error:
        raise WriteError(f"cannot write: {error.strerror or error}", path=destination) from error


def _compare(original: Path, back: Path) -> tuple[ComparedFile, ...]:
    """Hash all files of both folders, all but the manifest that our writer adds."""
    before, after = _hashes(original), _hashes(back)
    return tuple(
        ComparedFile(
            name, ((original if name in before else back) / name).stat().st_size, before.get(name), after.get(name)
        )
        for name in sorted(before.keys() | after.keys())
    )


def _hashes(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name != MANIFEST_NAME
    }


@contextmanager
def _workplace(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="espalier-demo-") as scratch:
            yield Path(scratch)
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
        occupied = any(keep.iterdir())
    except FileExistsError as error:
        raise OutputExistsError("exists and is not a folder", path=keep) from error
    except OSError as error:
        raise WriteError(f"cannot write: {error.strerror or error}", path=keep) from error
    if occupied:
        raise OutputExistsError("the folder is not empty", path=keep)
    yield keep
