"""Writes the kit to a folder."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from espalier_format.conformance.kit import KIT_FILE, kit_files, pinned_hashes
from espalier_format.errors import DigestError, OutputExistsError, WriteError


@dataclass(frozen=True, slots=True)
class WrittenKit:
    """What was written."""

    folder: Path
    files: int
    size: int
    """Bytes of all files."""


def write_kit(folder: str | Path) -> WrittenKit:
    """Write the whole kit into a folder that is new or empty: about 47 MB, the same bytes on every machine.

    `KIT_FILE` is written last. Every file is compared with the hash that the specification states of it.

    Raises:
        OutputExistsError: the folder is not empty, or is no folder.
        WriteError: the operating system refuses a write.
        DigestError: a file is not what the specification says it is, so this installation is damaged.
    """
    root = Path(folder)
    pinned = pinned_hashes()
    files = size = 0
    try:
        if ".." in root.parts:  # "absent/../full" is "full": nothing must be made to find that out
            root = root.resolve()
        _make_empty(root)
        for name, data in kit_files():
            if name != KIT_FILE and sha256(data).hexdigest() != pinned.get(name):
                text = "a file of the kit is not what the specification says it is; install the package again"
                raise DigestError(text, path=name, expected=pinned.get(name, "no such file"))
            path = root.joinpath(*name.split("/"))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            files, size = files + 1, size + len(data)
    except OutputExistsError:
        raise
    except ValueError as error:  # a null byte in the name
        raise WriteError(f"cannot write the kit: {error}", path=root) from error
    except OSError as error:
        raise WriteError(f"cannot write the kit: {error.strerror or error}", path=error.filename) from error
    return WrittenKit(root, files, size)


def _make_empty(root: Path) -> None:
    text = "the kit needs a folder that is new or empty"
    try:
        # Made first, and looked at then: what is there in between counts.
        root.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise OutputExistsError(text, path=root) from error
    if any(root.iterdir()):
        raise OutputExistsError(text, path=root)
