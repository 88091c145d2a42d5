"""What is built and installed: complete, each file once, one top-level name, and it runs.

Builds without network and without isolation, with the build tools of the test environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
LINKED = ("converters", "kernels", "spec")


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command and show its output if it fails."""
    result = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build the wheel from the checkout, the sdist, and a wheel from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check")
    run(*build, "--wheel", "--outdir", folder / "direct", ROOT, cwd=folder)
    run(*build, "--outdir", folder / "by-sdist", ROOT, cwd=folder)
    return {
        "wheel": next((folder / "direct").glob("*.whl")),
        "sdist": next((folder / "by-sdist").glob("*.tar.gz")),
        "wheel from sdist": next((folder / "by-sdist").glob("*.whl")),
    }


def source_files() -> list[str]:
    """Return what a wheel must hold, by walking the four folders apart and placing three inside the first."""
    files = [
        f"espalier_format/{folder}/{path.relative_to(ROOT / folder)}"
        for folder in LINKED
        for path in walk(ROOT / folder)
    ]
    package = ROOT / "espalier_format"
    files += [str(path.relative_to(ROOT)) for path in walk(package) if path.relative_to(package).parts[0] not in LINKED]
    return sorted(files)


def walk(folder: Path) -> list[Path]:
    """Return the files below a folder, without caches."""
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def contents(wheel: Path) -> dict[str, bytes]:
    """Return the files of a wheel; fails if a name is there twice."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert len(names) == len(set(names))
        return {name: archive.read(name) for name in names}


@pytest.mark.parametrize("name", ["wheel", "wheel from sdist"])
def test_wheel_holds_each_file_once(built: dict[str, Path], name: str) -> None:
    files = contents(built[name])
    held = sorted(file for file in files if ".dist-info/" not in file)
    assert held == source_files()
    for file in held:
        assert files[file] == (ROOT / file).read_bytes(), file


def test_wheel_has_one_top_level_name(built: dict[str, Path]) -> None:
    tops = {PurePosixPath(name).parts[0] for name in contents(built["wheel"])}
    assert sorted(top for top in tops if not top.endswith(".dist-info")) == ["espalier_format"]
    assert len(tops) == 2


def test_wheel_from_sdist_is_the_same(built: dict[str, Path]) -> None:
    assert contents(built["wheel from sdist"]) == contents(built["wheel"])


def test_sdist_holds_tests_and_documents(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as archive:
        names = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in archive.getnames()}
    for needed in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "spec/grids.json", "tests/conftest.py"):
        assert needed in names, needed


def test_installed_wheel_runs_the_demo(built: dict[str, Path], tmp_path: Path) -> None:
    """Away from the checkout, with the installed files alone; its dependencies come from the test environment."""
    target = tmp_path / "site"
    run(
        sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--disable-pip-version-check",
        "--root-user-action=ignore", "--target", target, built["wheel"], cwd=tmp_path,
    )  # fmt: skip
    where = run(
        sys.executable,
        "-c",
        "import espalier_format; print(espalier_format.__file__)",
        cwd=tmp_path,
        PYTHONPATH=str(target),
    )
    assert Path(where.stdout.strip()).is_relative_to(target)
    demo = run(sys.executable, "-m", "espalier_format", "demo", cwd=tmp_path, PYTHONPATH=str(target))
    assert "identical" in demo.stdout
    assert demo.stderr == ""
