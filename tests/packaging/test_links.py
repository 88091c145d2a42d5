"""The three sub-packages live at the top of the repository and are linked into the package (CONTRIBUTING.md)."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKED = ("converters", "kernels", "spec")


@pytest.mark.parametrize("name", LINKED)
def test_link_leads_to_the_top_level_folder(name: str) -> None:
    """A checkout without support for links holds a text file here instead, and would build a broken wheel."""
    link = ROOT / "espalier_format" / name
    assert link.is_symlink()  # in an unpacked source archive, too: hatch_build.py makes it
    assert link.readlink() == Path("..") / name
    assert link.resolve() == ROOT / name
    assert link.is_dir()


@pytest.mark.parametrize("name", LINKED)
def test_linked_package_imports_from_an_existing_file(name: str) -> None:
    module = importlib.import_module(f"espalier_format.{name}")
    assert module.__file__ is not None
    assert Path(module.__file__).is_file()


@pytest.mark.parametrize("name", LINKED)
def test_git_stores_a_link(name: str) -> None:
    """Mode 120000, so that clones get links. Says nothing where this is no git checkout (a source archive)."""
    if not _is_checkout():
        pytest.skip("not a git checkout of this project, or git is not installed")
    assert _tracked(f"espalier_format/{name}").split()[:1] == ["120000"]


def _is_checkout() -> bool:
    return shutil.which("git") is not None and bool(_tracked("pyproject.toml"))


def _tracked(path: str) -> str:
    command = ["git", "-C", str(ROOT), "ls-files", "--stage", "--", path]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout
