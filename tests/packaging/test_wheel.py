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


def test_sdist_holds_each_file_once(built: dict[str, Path]) -> None:
    """The linked folders are at the top only. What the build adds is not looked at."""
    with tarfile.open(built["sdist"]) as archive:
        members = archive.getmembers()
        assert all(member.isfile() for member in members)
        names = [str(PurePosixPath(*PurePosixPath(member.name).parts[1:])) for member in members]
    assert len(names) == len(set(names))
    package = {name.removeprefix("espalier_format/") for name in source_files()}
    expected = {name if name.split("/")[0] in LINKED else f"espalier_format/{name}" for name in package}
    expected |= {str(path.relative_to(ROOT)) for top in ("tests", "benchmarks", "docs") for path in walk(ROOT / top)}
    expected |= {path.name for path in ROOT.iterdir() if path.suffix in (".md", ".toml", ".txt", ".py")}
    assert set(names) - {"PKG-INFO", ".gitignore"} == expected | {"LICENSE", "Makefile"}


@pytest.fixture
def unpacked(built: dict[str, Path], tmp_path: Path) -> Path:
    """The source archive, unpacked."""
    with tarfile.open(built["sdist"]) as archive:
        archive.extractall(tmp_path, filter="data")
    return next(tmp_path.iterdir())


def test_editable_installation_from_the_sdist_gets_its_links(unpacked: Path) -> None:
    package = unpacked / "espalier_format"
    assert not any((package / name).exists() for name in LINKED)
    build = "from hatchling.build import build_editable; print(build_editable({!r}))"
    for _ in range(2):  # a second time, the links are there
        made = run(sys.executable, "-c", build.format(str(unpacked.parent)), cwd=unpacked).stdout.strip()
        assert [package / name for name in LINKED if not (package / name).is_symlink()] == []
    held = contents(unpacked.parent / made)
    paths = [name for name in held if ".dist-info/" not in name]
    assert [held[name].decode().strip() for name in paths] == [str(unpacked)]
    where = "import espalier_format.kernels as kernels; print(kernels.__file__)"
    found = run(sys.executable, "-c", where, cwd=unpacked.parent, PYTHONPATH=str(unpacked))
    assert Path(found.stdout.strip()) == package / "kernels" / "__init__.py"


@pytest.fixture(scope="module")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed, and nothing else: its dependencies come from the test environment."""
    target = tmp_path_factory.mktemp("installed") / "site"
    run(
        sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--disable-pip-version-check",
        "--root-user-action=ignore", "--target", target, built["wheel"], cwd=target.parent,
    )  # fmt: skip
    return target


def test_installed_wheel_runs_the_demo(installed: Path, tmp_path: Path) -> None:
    """Away from the checkout, with the installed files alone."""
    where = run(
        sys.executable,
        "-c",
        "import espalier_format; print(espalier_format.__file__)",
        cwd=tmp_path,
        PYTHONPATH=str(installed),
    )
    assert Path(where.stdout.strip()).is_relative_to(installed)
    demo = run(sys.executable, "-m", "espalier_format", "demo", cwd=tmp_path, PYTHONPATH=str(installed))
    assert "identical" in demo.stdout
    assert demo.stderr == ""


def test_installed_wheel_has_the_conformance_kit(installed: Path, tmp_path: Path) -> None:
    """Vectors, bad checkpoints and hashes come with it, and it tries a decoder of the current folder."""
    (tmp_path / "decoder_of_a_runtime.py").write_text("def refuse(folder):\n    return 'malformed'\n")
    command = (sys.executable, "-m", "espalier_format", "conformance")
    run(*command, "--write", tmp_path / "kit", cwd=tmp_path, PYTHONPATH=str(installed))
    assert (tmp_path / "kit/kit.json").read_bytes() == (ROOT / "spec/vectors/kit.json").read_bytes()
    assert (tmp_path / "kit/refused/header-json/model.safetensors").exists()
    decoder = ("--decoder", "decoder_of_a_runtime:refuse", "--kind", "open", "--only", "open/refused/header-json")
    report = run(*command, *decoder, cwd=tmp_path, PYTHONPATH=str(installed))
    assert "1 case, 125 left out, nothing wrong" in report.stdout


def test_pytest_finds_the_plugin_and_is_not_disturbed_by_it(installed: Path, tmp_path: Path) -> None:
    """Also where the package was imported before pytest began, and every warning is an error."""
    (tmp_path / "test_own.py").write_text(
        "import sys\n\n\ndef test_own():\n    assert 'espalier_format.conformance.suite' not in sys.modules\n"
    )
    start = "import sys, pytest, espalier_format; sys.exit(pytest.main(sys.argv[1:]))"
    for begin in (("-m", "pytest"), ("-c", start)):
        command = (sys.executable, "-W", "error", *begin, "-q", "-p", "no:cacheprovider")
        alone = run(*command, cwd=tmp_path, PYTHONPATH=str(installed))
        assert "1 passed" in alone.stdout
        decoder = "codes=espalier_format.conformance.adapters.numpy_adapter:codes"
        both = run(*command, "--espalier-decoder", decoder, "-k", "int6", cwd=tmp_path, PYTHONPATH=str(installed))
        assert "2 passed" in both.stdout
