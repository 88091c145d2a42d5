"""The pytest plugin in runs of its own: opt-in, one test per case, and without effect where nobody asks for it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

PLUGIN = "espalier_format.conformance.pytest_plugin"
DECODERS = """
from espalier_format.conformance.adapters import numpy_adapter

def right(trellis, codebook):
    return numpy_adapter.codes(trellis, codebook)

def wrong(trellis, codebook):
    codes = right(trellis, codebook).copy()
    codes[3, 5] += 1
    return codes
"""
OWN_TEST = """
import sys

def test_own():
    assert not {"numpy", "pydantic", "torch", "typer"} & set(sys.modules)
    assert "espalier_format.conformance.pytest_plugin" in sys.modules
    assert not [name for name in sys.modules if name.startswith("espalier_format.conformance.s")]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "decoders.py").write_text(DECODERS)
    (tmp_path / "test_own.py").write_text(OWN_TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\naddopts = --strict-markers\n")
    return tmp_path


AS_MODULE = (sys.executable, "-m", "pytest")
AS_SCRIPT = (sys.executable, "-c", "import sys; del sys.path[0]; import pytest; sys.exit(pytest.main())")
"""As the program ``pytest`` starts: its first place to import from is not the current folder."""


def run(project: Path, *arguments: str, code: int = 0, start: tuple[str, ...] = AS_MODULE) -> str:
    """Run pytest with this plugin alone, by its entry point where the installed package has one already."""
    registered = any(point.value == PLUGIN for point in entry_points(group="pytest11"))
    result = subprocess.run(
        [*start, "-p", "no:cacheprovider", *([] if registered else ["-p", PLUGIN]), *arguments],
        cwd=project,
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


def test_without_its_option_it_does_nothing_and_loads_nothing(project: Path) -> None:
    assert "1 passed" in run(project, "-q", "-p", "no:hypothesispytest")


def test_one_test_per_case(project: Path) -> None:
    listed = run(project, "--collect-only", "-q", "--espalier-decoder", "codes=decoders:right")
    assert "test_own.py::test_own" in listed
    assert "espalier-conformance::codes/int6@4\n" in listed
    assert "42 tests collected" in listed
    chosen = run(project, "-q", "--espalier-decoder", "codes=decoders:right", "-k", "espalier-conformance")
    assert "41 passed, 1 deselected" in chosen


def test_decoders_of_the_current_folder_however_pytest_is_started(project: Path) -> None:
    """Also where the tests lie elsewhere, change the folder, and pytest itself adds nothing to the path."""
    tests = project / "tests"
    tests.mkdir()
    (tests / "test_elsewhere.py").write_text(
        "def test_own(tmp_path, monkeypatch):\n    monkeypatch.chdir(tmp_path)\n    import later\n"
    )
    (project / "later.py").write_text("")
    for start in (AS_SCRIPT, AS_MODULE):
        chosen = run(
            project, "-q", "--import-mode=importlib", "tests", "--espalier-decoder", "codes=decoders:right",
            "-k", "own or int8", start=start,
        )  # fmt: skip
        assert "4 passed" in chosen  # its own, two of int8, one that is refused
    run(project, "-q", "--import-mode=importlib", "tests", code=1, start=AS_SCRIPT)


def test_failures_are_named(project: Path) -> None:
    output = run(project, "-q", "--espalier-decoder", "codes=decoders:wrong", "-k", "int6 or refused", code=1)
    assert "FAILED espalier-conformance::codes/int6@4 - codes/int6@4: code[3, 5] is " in output
    assert "2 failed, 5 passed" in output
    assert "Traceback" not in output


def test_folders_and_weights(project: Path) -> None:
    adapter = "espalier_format.conformance.adapters.numpy_adapter"
    output = run(project, "-q", "--espalier-decoder", adapter, "--espalier-exact", "-k", "valid or lm_head or ties")
    assert "17 passed" in output
    for dtype in ("float16", "fp16"):
        one_format = ("--espalier-decoder", adapter, "--espalier-dtype", dtype, "--espalier-exl3")
        assert "11 passed" in run(project, "-q", *one_format, "-k", "valid or lm_head or ties")
    refused = run(project, "--espalier-decoder", adapter, "--espalier-dtype", "float8", code=4)
    assert "--espalier-dtype: no such output dtype (expected bfloat16, float16, float32, got float8)" in refused


@pytest.mark.parametrize("value", ["codes=decoders:nothing", "decoders:right", "codes=absent:f"])
def test_bad_usage(project: Path, value: str) -> None:
    output = run(project, "-q", "--espalier-decoder", value, code=4)
    assert "ERROR: --espalier-decoder: " in output
    assert "Traceback" not in output


def test_the_package_names_it() -> None:
    import tomllib

    stated = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    assert stated["project"]["entry-points"]["pytest11"] == {"espalier-format": PLUGIN}
