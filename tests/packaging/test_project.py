"""Facts about the repository that no other test looks at: versions, sizes of modules and of the repository."""

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
MAX_REPOSITORY_BYTES = 10_000_000


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
        ".venv-lowest",
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


def test_the_lowest_versions_are_the_ones_that_are_tested() -> None:
    """Each ``>=`` of the dependencies, to which ``make test-lowest`` keeps; 1.26 and 1.26.0 are one version."""
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    lowest = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints-lowest.txt").read_text("ascii"), re.MULTILINE))
    for dependency in stated:
        floor = re.match(r"([\w-]+)>=([\d.]+)", dependency)
        assert floor is not None, dependency
        assert lowest[floor[1]] in (floor[2], f"{floor[2]}.0"), dependency


def test_modules_are_small() -> None:
    """One concept, one file: the bounds that CONTRIBUTING states, "usually" being nine modules of ten."""
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    stated = re.search(r"One concept, one file, usually under (\d+) lines, never over (\d+)\.", text)
    assert stated is not None
    usual, most = map(int, stated.groups())
    sizes = {
        str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines())
        for folder in SOURCE_FOLDERS
        for file in (ROOT / folder).rglob("*.py")
        if not (folder == "espalier_format" and file.relative_to(ROOT / folder).parts[0] in SOURCE_FOLDERS)
    }
    assert {name: lines for name, lines in sizes.items() if lines > most} == {}
    larger = {name: lines for name, lines in sizes.items() if lines >= usual}
    assert len(larger) <= len(sizes) / 10, larger


def test_repository_is_small() -> None:
    """Compressed one by one, as git stores files; the history of a clone comes on top."""
    assert sum(len(zlib.compress(file.read_bytes())) for file in project_files()) < MAX_REPOSITORY_BYTES


@pytest.mark.parametrize("folder", SOURCE_FOLDERS)
def test_every_folder_with_modules_is_a_package(folder: str) -> None:
    """A folder without ``__init__`` imports in a checkout and may be missing from other build back ends."""
    folders = {file.parent for file in (ROOT / folder).rglob("*.py")}
    assert [str(path.relative_to(ROOT)) for path in sorted(folders) if not (path / "__init__.py").is_file()] == []
