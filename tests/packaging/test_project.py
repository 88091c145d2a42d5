"""Facts about the repository that no other test looks at: versions, stray paths, sizes of modules."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
import zlib
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE_FOLDERS = ("espalier_format", "converters", "kernels", "spec")
MAX_MODULE_LINES = 350
MAX_REPOSITORY_BYTES = 10_000_000
TEXT_SUFFIXES = {".py", ".md", ".toml", ".json", ".txt", ".yml", ".yaml", ".cfg", ".sh", ""}
# Put together from pieces, so that this file does not hold what it looks for.
OUTSIDE = re.compile(
    "|".join("/" + place + "/" for place in ("work", "home", "root", "Users", "tmp")) + r"|\.\./" + "shared"
)


def project_files() -> list[Path]:
    """Return the files of the project: what git tracks or would, else everything but caches."""
    if shutil.which("git") is not None:
        listing = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        result = subprocess.run(listing, check=False, capture_output=True, text=True)
        if result.returncode == 0 and "pyproject.toml\0" in result.stdout:
            files = [ROOT / name for name in result.stdout.split("\0") if name]
            return [file for file in files if file.is_file() and not file.is_symlink()]
    hidden = {
        ".git",
        ".venv",
        "__pycache__",
        "dist",
        "build",
        ".mypy_cache",
        ".ruff_cache",
        ".pytest_cache",
        ".hypothesis",
    }
    return [file for file in ROOT.rglob("*") if file.is_file() and not hidden & set(file.relative_to(ROOT).parts)]


def test_version_is_the_same_everywhere() -> None:
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    headings = re.findall(r"^## \[?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert version("espalier-format") == stated
    assert headings[:1] == [stated]


def test_no_path_outside_the_repository() -> None:
    """Text files name no folder of the machine they were written on. Binary fixtures are not searched."""
    found = []
    for file in project_files():
        if file.suffix not in TEXT_SUFFIXES:
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        found += [
            f"{file.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
            for match in OUTSIDE.finditer(text)
        ]
    assert found == []


def test_modules_are_small() -> None:
    """One concept, one file; a module that outgrows this holds two."""
    sizes = {
        str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines())
        for folder in SOURCE_FOLDERS
        for file in (ROOT / folder).rglob("*.py")
        if not (folder == "espalier_format" and file.relative_to(ROOT / folder).parts[0] in SOURCE_FOLDERS)
    }
    assert {name: lines for name, lines in sizes.items() if lines > MAX_MODULE_LINES} == {}


def test_repository_is_small() -> None:
    """Compressed one by one, as git stores files; the history of a clone comes on top."""
    assert sum(len(zlib.compress(file.read_bytes())) for file in project_files()) < MAX_REPOSITORY_BYTES


@pytest.mark.parametrize("folder", SOURCE_FOLDERS)
def test_every_folder_with_modules_is_a_package(folder: str) -> None:
    """A folder without ``__init__`` imports in a checkout and may be missing from other build back ends."""
    folders = {file.parent for file in (ROOT / folder).rglob("*.py")}
    assert [str(path.relative_to(ROOT)) for path in sorted(folders) if not (path / "__init__.py").is_file()] == []
