"""The old content of a destination under --force: errors and interrupts at every step of a commit, and kills.

Kills are real ones of a child process; power loss is not simulated.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from espalier_format.container import durable, replacement, staging
from espalier_format.container.hashing import FileRecord
from espalier_format.container.names import CONFIG_NAME, PROGRESS_NAME
from espalier_format.container.writer import CheckpointWriter
from espalier_format.errors import OutputExistsError, UsageError, WriteError

OLD = {CONFIG_NAME: b"old", "same/a/x.txt": b"old", "same/a/b/y.txt": b"old", "only/old.txt": b"old"}
NEW = {CONFIG_NAME: b"new", "same/a/x.txt": b"new", "same/a/b/y.txt": b"new", "only-new/z.txt": b"new"}


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of syncs is tested elsewhere."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def manifest(records: Mapping[str, FileRecord]) -> bytes:
    return json.dumps({"files": list(records)}).encode()


def write(out: Path, files: Mapping[str, bytes], *, force: bool = True) -> None:
    with CheckpointWriter(out, force=force) as writer:
        for name, data in files.items():
            writer.add_bytes(name, data)
        writer.finish(manifest=manifest)


def content(out: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    return {name: data for name, data in found.items() if name != "espalier_manifest.json"}


Fault = Callable[[], None]


def fault_at(numbers: Iterator[bool], error: Callable[[], BaseException]) -> Fault:
    def strike() -> None:
        if next(numbers, False):
            raise error()

    return strike


def install(monkeypatch: pytest.MonkeyPatch, strike: Fault) -> None:
    """Let `strike` run before and after every rename and every sync of a folder."""
    real_rename, real_sync = Path.rename, durable.sync_folder

    def rename(self: Path, target: Path) -> Path:
        strike()
        result = real_rename(self, target)
        strike()
        return result

    def sync(folder: Path) -> None:
        strike()
        real_sync(folder)

    monkeypatch.setattr(Path, "rename", rename)
    for module in (staging, durable):
        monkeypatch.setattr(module, "sync_folder", sync)


def eio() -> BaseException:
    return OSError(5, "Input/output error")


def once(step: int) -> Iterator[bool]:
    yield from (number == step for number in range(step + 1))


def twice(step: int) -> Iterator[bool]:
    yield from (number >= step for number in range(step + 2))


@pytest.mark.parametrize("error", [eio, KeyboardInterrupt])
@pytest.mark.parametrize("pattern", [once, twice])
def test_a_failed_commit_brings_all_back(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Callable[[], BaseException],
    pattern: Callable[[int], Iterator[bool]],
) -> None:
    """At the 1st, 2nd … step of the commit, and a second time while it is undone."""
    strikes = [0]
    write(tmp_path / "count", OLD)
    with monkeypatch.context() as patch:

        def count() -> None:
            strikes[0] += 1

        install(patch, count)
        write(tmp_path / "count", NEW)
    outcomes: list[bool] = []
    for step in range(strikes[0]):
        out = tmp_path / str(step)
        write(out, OLD)
        with monkeypatch.context() as patch:
            install(patch, fault_at(pattern(step), error))
            try:
                write(out, NEW)
                raised = False
            except (WriteError, KeyboardInterrupt):
                raised = True
        if error is eio and (out / PROGRESS_NAME).exists():
            # The disk refused the way back too, or the removal of what is old: the next run makes it good.
            kept = content(out / PROGRESS_NAME / "old")
            if raised:
                assert {**content(out), **kept}.items() >= OLD.items(), step
            else:
                assert content(out).items() >= NEW.items(), step
            with CheckpointWriter(out, force=True):
                pass
        found = content(out)
        assert found == (OLD if raised else NEW), step
        assert not (out / PROGRESS_NAME).exists(), step
        outcomes.append(raised)
    assert set(outcomes) == {True, False}  # nothing can fail any more while the old content is removed


def test_write_error_says_where_the_old_content_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is deleted when it cannot be moved back, and the next run moves it back."""
    out = tmp_path / "out"
    write(out, OLD)
    with monkeypatch.context() as patch:
        install(patch, fault_at((number > 6 for number in range(10_000)), eio))
        with pytest.raises(WriteError, match="moved back of the old content is in") as caught:
            write(out, NEW)
    old = out / PROGRESS_NAME / "old"
    assert str(old) in str(caught.value)
    assert content(old)
    assert {**content(out), **content(old)}.items() >= OLD.items()
    with CheckpointWriter(out, force=True):
        pass
    assert content(out) == OLD


KILL = """
    import json, os, signal, sys
    from pathlib import Path
    from espalier_format.container import durable, staging
    sys.path[:0] = [sys.argv[1]]
    from test_replacement import NEW, write

    out, left = Path(sys.argv[3]), [int(sys.argv[2])]

    def strike():
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    real_rename, real_sync, real_unlink = Path.rename, durable.sync_folder, os.unlink

    def rename(self, target):
        strike()
        return real_rename(self, target)

    def sync(folder):
        strike()
        real_sync(folder)

    def unlink(*arguments, **options):
        strike()
        real_unlink(*arguments, **options)

    Path.rename, os.unlink, durable.sync_folder, staging.sync_folder = rename, unlink, sync, sync
    write(out, NEW)
    """


def test_old_content_survives_a_kill_and_a_failing_run_after_it(tmp_path: Path) -> None:
    """Whatever step the kill hit, afterwards everything is old or everything is new."""
    outcomes = []
    for step in range(40):
        out = tmp_path / str(step)
        write(out, OLD)
        code = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(KILL), str(Path(__file__).parent), str(step), str(out)], check=False
        ).returncode
        with CheckpointWriter(out, force=True) as writer:  # not finished
            writer.add_bytes("x", b"")
        assert content(out) in (OLD, NEW), step
        outcomes.append(content(out)[CONFIG_NAME])
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert outcomes == sorted(outcomes, reverse=True)
    assert set(outcomes) == {b"old", b"new"}


def test_a_resumed_run_finds_the_old_content_again(tmp_path: Path) -> None:
    """Without --force it is refused then: what was replaced before the kill is back, and would be replaced again."""
    out = tmp_path / "out"
    write(out, OLD)
    work = out / PROGRESS_NAME
    (work / "job").mkdir(parents=True)
    (work / "job" / "state").touch()
    (work / "old").mkdir()
    entries = [path for path in out.iterdir() if path != work]
    (work / "names.json").write_text(json.dumps({"files": [], "old": [path.name for path in entries], "new": ["x"]}))
    for path in entries:
        path.rename(work / "old" / path.name)
    with (
        pytest.raises(OutputExistsError, match="not empty"),
        CheckpointWriter(out, workspace="job", resume=True),
    ):
        pass
    assert (work / "job" / "state").exists()
    (work / "job" / "state").unlink()
    with CheckpointWriter(out, workspace="job", resume=True, force=True):
        pass
    assert content(out) == OLD


def test_interrupts_after_the_commit_do_not_undo_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    write(out, OLD)
    real, calls = replacement.shutil.rmtree, [0]

    def rmtree(path: Path, *, ignore_errors: bool = False) -> None:
        calls[0] += 1
        if calls[0] < 3:
            raise KeyboardInterrupt
        real(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(replacement.shutil, "rmtree", rmtree)
    write(out, NEW)
    monkeypatch.undo()
    assert content(out) == NEW
    assert not (out / PROGRESS_NAME).exists()


def test_the_lock_file_of_a_run_that_has_just_ended_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened before the other run removed it and locked after: a third run could lock a new file of that name."""
    real = durable.fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        (tmp_path / "out" / PROGRESS_NAME / "lock").unlink()
        real(descriptor, operation)

    monkeypatch.setattr(durable.fcntl, "flock", flock)
    with pytest.raises(OutputExistsError, match="another process"), CheckpointWriter(tmp_path / "out"):
        pass


@pytest.mark.parametrize("destination", ["mount", "mount/sub", "mount/sub/new"])
def test_usage_error_for_a_source_under_another_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, destination: str
) -> None:
    """A bind mount, which needs privileges, is imitated: one folder reports the device and inode of another."""
    (tmp_path / "src" / "sub").mkdir(parents=True)
    (tmp_path / "mount" / "sub").mkdir(parents=True)
    real = Path.stat

    def stat(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        return real(tmp_path / "src" if self == tmp_path / "mount" else self, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(UsageError, match="apart"):
        CheckpointWriter(tmp_path / destination, force=True, sources=[tmp_path / "src"])
    with pytest.raises(UsageError, match="apart"):
        CheckpointWriter(tmp_path / "src", force=True, sources=[tmp_path / destination.removesuffix("/new")])
    CheckpointWriter(tmp_path / "elsewhere", sources=[tmp_path / "src"])
