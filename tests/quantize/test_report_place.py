"""Where the report of `quantize` may go: decided before the work, and nothing but a file is ever replaced."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from espalier_format.errors import EspalierError, MissingFileError, OutputExistsError, UsageError, WriteError
from espalier_format.operations.places import report_place
from espalier_format.operations.quantize import quantize_checkpoint

pytestmark = pytest.mark.usefixtures("fake_encoder")


def refused(source: Path, report: Path | str, kind: type[EspalierError], words: str, **options: Path) -> None:
    """Nothing is written then, no part of the output either."""
    out = source.parent / "out"
    with pytest.raises(kind, match=words):
        quantize_checkpoint(source, out, bits=2, report=report, **options)  # type: ignore[arg-type] - paths only
    assert not out.exists()


def test_folders_that_are_not_for_it(dense: Path, tmp_path: Path) -> None:
    for report in (tmp_path / "out" / "sub" / "r.json", tmp_path / "nowhere" / "r.json"):
        refused(dense, report, MissingFileError, "folder of the report does not exist")
    refused(dense, dense / "config.json" / "r.json", MissingFileError, "folder of the report does not exist")
    for report in (dense / "r.json", tmp_path / "out"):
        refused(dense, report, UsageError, "outside of the checkpoints")
    refused(dense, tmp_path, OutputExistsError, "no regular file")


def test_what_is_no_regular_file_stays(dense: Path, tmp_path: Path) -> None:
    fifo, device, folder = tmp_path / "fifo", tmp_path / "device", tmp_path / "folder"
    os.mkfifo(fifo)
    device.symlink_to("/dev/null")
    (tmp_path / "there").mkdir()
    folder.symlink_to("there")
    for report in (fifo, device, folder):
        before = (report.lstat().st_ino, report.lstat().st_mode)
        refused(dense, report, OutputExistsError, "no regular file")
        assert (report.lstat().st_ino, report.lstat().st_mode) == before
    reading, writing = os.pipe()  # as a shell passes >(command): behind the link is what has no name
    try:
        refused(dense, f"/dev/fd/{writing}", OutputExistsError, "no regular file")
    finally:
        os.close(reading)
        os.close(writing)


def test_names_that_the_system_refuses(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for report in (tmp_path / "loop", tmp_path / ("x" * 300), f"{tmp_path}/a\0b"):
        refused(dense, report, WriteError, "the report cannot be written there")


@pytest.mark.parametrize("exists", [True, False])
def test_links_are_written_through(exists: bool, dense: Path, tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    target, link = tmp_path / "reports" / "real.json", tmp_path / "link.json"
    if exists:
        target.write_text("old")
        target.chmod(0o600)
    link.symlink_to("reports/real.json")
    report = quantize_checkpoint(dense, tmp_path / "out", bits=2, report=link)
    assert str(link.readlink()) == "reports/real.json"
    assert json.loads(target.read_text()) == report.to_json()
    assert not exists or target.stat().st_mode & 0o777 == 0o600
    assert list((tmp_path / "reports").iterdir()) == [target]


def test_a_link_into_a_checkpoint_is_refused(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(dense / "config.json")
    refused(dense, tmp_path / "link.json", UsageError, "outside of the checkpoints")


@pytest.mark.parametrize("role", ["recipe", "sensitivity"])
def test_a_file_that_is_read_is_not_replaced(role: str, dense: Path, tmp_path: Path) -> None:
    file = tmp_path / "file.toml"
    file.write_text({"recipe": '[[rule]]\nmatch = "*"\ncodebook = "e2m1@2"\n', "sensitivity": '"*" = 2.0\n'}[role])
    (tmp_path / "link").symlink_to(file)
    before = file.read_bytes()
    for report in (file, tmp_path / "link"):
        refused(dense, report, UsageError, "a file that is read", **{role: file})
    assert file.read_bytes() == before


def test_no_hessian_is_replaced(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "hessians").mkdir()
    for report in ("hessians", "hessians/new.safetensors"):
        kind = OutputExistsError if report == "hessians" else UsageError
        refused(dense, tmp_path / report, kind, "the report", hessians=tmp_path / "hessians")


def test_folders_that_cannot_be_followed(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(WriteError, match="the report cannot be written there"):
        report_place(tmp_path / "new", checkpoints=[tmp_path / "circle" / "x"], inputs=[])


def test_what_is_write_protected(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of the system, for an administrator may write everywhere."""
    old = tmp_path / "old.json"
    old.write_text("old")
    for protected in (old, tmp_path):
        monkeypatch.setattr(os, "access", lambda path, mode, protected=protected: Path(path) != protected)
        refused(dense, old, OutputExistsError, "write-protected")
    assert old.read_text() == "old"


def test_where_the_work_is_done_does_not_matter(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = quantize_checkpoint(dense, tmp_path / "out", bits=2, report="r.json")
    assert json.loads((tmp_path / "r.json").read_text()) == report.to_json()
