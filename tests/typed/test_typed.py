"""The types of the public API, as mypy sees them from outside."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def _mypy(*files: Path) -> str:
    # The cache is that of `mypy` in the root of the project: only the given files are looked at anew.
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--show-error-codes", *map(str, files)]
    result = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=600)
    assert not result.stderr, result.stderr
    return result.stdout


def test_types_are_those_that_are_documented() -> None:
    assert _mypy(HERE / "consumer.py") == ""


def test_mistakes_are_found() -> None:
    lines = (HERE / "mistakes.py").read_text(encoding="utf-8").splitlines()
    expected = {
        (number, line.rpartition("# error: ")[2]) for number, line in enumerate(lines, 1) if "# error: " in line
    }
    found = re.findall(r"mistakes\.py:(\d+): error: .*\[([a-z-]+)\]$", _mypy(HERE / "mistakes.py"), re.MULTILINE)
    assert {(int(number), code) for number, code in found} == expected
    assert len(expected) > 5
