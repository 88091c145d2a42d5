"""The table of capabilities in the README is the one that tests recorded, and each of its entries has a test.

That the recorded versions still behave so is not checked: only a run with them can tell.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
from capabilities import BEGIN, END, HOSTS, README, ROOT, Record, Recorder, read, render, table_in

SAMPLE = """
    import pytest

    @pytest.mark.capability("numpy decoder", "adds")
    def test_one():
        pass

    @pytest.mark.capability("numpy decoder", "adds")
    def test_two():
        assert {second}

    @pytest.mark.capability("numpy decoder", "subtracts")
    def test_three():
        pytest.skip("not here")

    def test_four(record_capability):
        record_capability("numpy decoder", "level " + "2")

    @pytest.mark.capability("numpy decoder", "divides")
    @pytest.mark.xfail(strict=True)
    def test_five():
        assert False

    @pytest.fixture
    def broken():
        raise RuntimeError

    @pytest.mark.capability("numpy decoder", "multiplies")
    def test_six(broken):
        pass
    """


def _run(folder: Path, records: Path, *, second: bool) -> None:
    (folder / "test_sample.py").write_text(textwrap.dedent(SAMPLE).format(second=second))
    subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "capabilities", "-p", "no:cacheprovider"),
            *("--rootdir", str(folder), "--record-capabilities", f"--capabilities-file={records}", str(folder)),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        check=False,
        capture_output=True,
        timeout=120,
    )


def test_a_run_records_what_passed_and_takes_back_what_failed(tmp_path: Path) -> None:
    records = tmp_path / "records.json"
    other = Record("vLLM", "1.0", "CPU", "serves")
    stale = Record("numpy decoder", version("numpy"), "CPU", "multiplies")
    skipped = Record("numpy decoder", version("numpy"), "CPU", "subtracts")
    recorder = Recorder()
    for record in (other, stale, skipped):
        recorder.add(record, passed=True)
    recorder.write(records)
    _run(tmp_path, records, second=True)
    expected = {("vLLM", "serves"), ("numpy decoder", "subtracts"), ("numpy decoder", "adds")}
    expected.add(("numpy decoder", "level 2"))
    assert {(record.host, record.capability) for record in read(records)} == expected
    _run(tmp_path, records, second=False)
    assert {(record.host, record.capability) for record in read(records)} == expected - {("numpy decoder", "adds")}


def test_the_table_groups_versions_of_equal_capabilities() -> None:
    records = [
        Record("vLLM", "0.9.2", "CPU", "serves"),
        Record("vLLM", "0.10.0", "CPU", "serves"),
        Record("vLLM", "0.10.0", "H200", "serves"),
        Record("numpy decoder", "2.0", "CPU", "b"),
        Record("numpy decoder", "2.0", "CPU", "a"),
    ]
    assert render(records).splitlines()[2:] == [
        "| numpy decoder | 2.0 | CPU | a; b |",
        "| vLLM | 0.9.2, 0.10.0 | CPU | serves |",
        "| vLLM | 0.10.0 | H200 | serves |",
    ]


def test_the_readme_shows_what_was_recorded() -> None:
    text = README.read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    assert table_in(text) == render(read()), "run: python tests/capabilities.py"


@pytest.mark.parametrize("record", read(), ids=str)
def test_every_entry_has_a_test(record: Record) -> None:
    assert record.host in HOSTS
    assert (record.host, record.capability) in _claims()


def test_a_claim_is_of_a_host() -> None:
    """The same words of another host are no claim, nor is a string that stands in a comment or alone."""
    text = """
    @pytest.mark.capability("a", "one")
    def test(record_capability):
        record_capability("b", f"two")  # record_capability("b", "three")
        record_capability("c", "four", device=True)
        print("a", "four")
    """
    assert _claims_in(textwrap.dedent(text)) == {("a", "one"), ("c", "four")}


@cache
def _claims() -> frozenset[tuple[str, str]]:
    """Return what the tests claim: (host, capability). This file's are samples."""
    paths = (path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__).resolve())
    return frozenset(claim for path in paths for claim in _claims_in(path.read_text(encoding="utf-8")))


def _claims_in(text: str) -> frozenset[tuple[str, str]]:
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            words = [word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
            if name in ("capability", "record_capability") and len(words) == 2:
                found.add((words[0], words[1]))
    return frozenset(found)
