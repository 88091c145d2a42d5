"""What was seen to work, with which version of which host: recorded by tests, kept in docs/capabilities.json.

A test says what it shows::

    @pytest.mark.capability("transformers", "generate() of a dense model")

or, where that is known only while it runs, by the fixture ``record_capability(host, capability)``. With
``--record-capabilities`` a run writes what its tests showed, for the versions that it ran with: a capability is
recorded when all tests that claim it passed, and taken back when one failed; a test that was skipped says nothing. What
other versions have shown stays. ``python tests/capabilities.py`` then writes the table into README.md, and a test fails
when the two disagree. ``make capabilities`` does both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "docs" / "capabilities.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- capabilities: begin -->", "<!-- capabilities: end -->"
OPTION = "--record-capabilities"
FILE_OPTION = "--capabilities-file"

HOSTS = {
    "numpy decoder": "numpy",
    "torch decoder": "torch",
    "CUDA kernels": "torch",
    "transformers": "transformers",
    "vLLM": "vllm",
    "compressed-tensors": "compressed-tensors",
}
"""Hosts in the order of the table, with the package whose version counts."""


@dataclass(frozen=True, order=True)
class Record:
    """A capability of one version of a host, on the CPU or a device."""

    host: str
    version: str
    device: str
    capability: str


class Recorder:
    """Gathers what the tests of one run showed."""

    def __init__(self) -> None:
        self.shown: dict[Record, bool] = {}

    def add(self, record: Record, *, passed: bool) -> None:
        self.shown[record] = self.shown.get(record, True) and passed

    def write(self, path: Path) -> None:
        """Merge into the file: add what all tests showed, remove what one test contradicted."""
        kept = {record for record in read(path) if record not in self.shown}
        kept.update(record for record, passed in self.shown.items() if passed)
        write(kept, path)


def write(records: Iterable[Record], path: Path = RECORDS) -> None:
    """Write a file of records, one to a line."""
    lines = [json.dumps(asdict(record), ensure_ascii=False) for record in sorted(records)]
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"capabilities": [\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8")


def read(path: Path = RECORDS) -> list[Record]:
    """Return the committed records; none where there is no file."""
    if not path.exists():
        return []
    return [Record(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))["capabilities"]]


def make_record(host: str, capability: str, *, device: str | None = None) -> Record:
    """Return the record for the version that is installed; ``device`` is None for the CPU."""
    try:
        found = version(HOSTS[host])
    except PackageNotFoundError:
        # vLLM's CPU wheel has a distribution of its own.
        found = version(f"{HOSTS[host]}-cpu")
    return Record(host, found.partition("+")[0], device or "CPU", capability)


def device_name() -> str:
    """Return the name of the CUDA device that tests marked with ``device=True`` ran on."""
    import torch

    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


def render(records: list[Record]) -> str:
    """Return the table for the README: a row for each host, device and set of capabilities."""
    rows: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for record in sorted(records):
        grouped.setdefault((record.host, record.device, record.version), []).append(record.capability)
    for (host, device, found), capabilities in grouped.items():
        rows.setdefault((host, device, tuple(capabilities)), []).append(found)
    lines = ["| host | version | on | tested |", "|---|---|---|---|"]
    for (host, device, capabilities), versions in sorted(rows.items(), key=lambda row: (_place(row[0][0]), row[0])):
        ordered = ", ".join(sorted(versions, key=_version_key))
        lines.append(f"| {host} | {ordered} | {device} | {'; '.join(capabilities)} |")
    return "\n".join(lines)


def table_in(text: str) -> str:
    """Return what stands between the two marks of a document."""
    return text.partition(BEGIN)[2].partition(END)[0].strip()


def _place(host: str) -> int:
    return list(HOSTS).index(host)


def _version_key(text: str) -> list[int]:
    return [int(part) if part.isdigit() else -1 for part in text.split(".")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, action="store_true", help="write what the tests showed to docs/capabilities.json")
    parser.addoption(FILE_OPTION, default=str(RECORDS), metavar="FILE", help="or to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "capability(host, capability, device=False): what the test shows of a host; see tests/capabilities.py",
    )
    config.stash[_RECORDER] = Recorder()


@pytest.fixture
def record_capability(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Record that ``host`` has a capability, if the test passes; ``device=True`` on a CUDA device."""

    def record(host: str, capability: str, *, device: bool = False) -> None:
        request.node.stash.setdefault(_CLAIMS, []).append((host, capability, device))

    return record


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    if item.config.getoption(OPTION) and (report.when == "call" or report.failed):
        claims = [(*mark.args, mark.kwargs.get("device", False)) for mark in item.iter_markers("capability")]
        for host, capability, on_device in claims + item.stash.get(_CLAIMS, []):
            if not report.skipped:
                record = make_record(host, capability, device=device_name() if on_device else None)
                item.config.stash[_RECORDER].add(record, passed=report.passed)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    recorder = session.config.stash[_RECORDER]
    if session.config.getoption(OPTION) and recorder.shown:
        recorder.write(Path(session.config.getoption(FILE_OPTION)))


_RECORDER = pytest.StashKey[Recorder]()
_CLAIMS = pytest.StashKey[list[tuple[str, str, bool]]]()


def main() -> int:
    """Add the records of the files that are named, made on other machines; write the table into README.md."""
    for path in sys.argv[1:]:
        write({*read(), *read(Path(path))})
    text = README.read_text(encoding="utf-8")
    if BEGIN not in text:
        sys.stderr.write(f"README.md has no {BEGIN}\n")
        return 2
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{render(read())}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
