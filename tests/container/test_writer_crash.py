"""The writer killed, and the writer on a full disk: real processes, real signals.

Power loss is not simulated; that data and names are synced in the right order is checked by test_writer's order test.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from espalier_format.container.index import INDEX_NAME
from espalier_format.container.names import CONFIG_NAME, MANIFEST_NAME, PROGRESS_NAME
from espalier_format.container.shard import Shard
from espalier_format.container.writer import CheckpointWriter

SCRIPT = """
    import json, os, signal, sys, time
    from pathlib import Path
    from espalier_format.container import staging
    from espalier_format.container.planned_tensor import PlannedTensor
    from espalier_format.container.writer import CheckpointWriter

    def write(stage, out, ready):
        def pause(here):
            if here == stage:
                os.write(ready, b"!")
                time.sleep(600)

        def chunks():
            yield bytes(5_000_000)
            pause("in shard")
            yield bytes(3_000_000)

        real, count = staging._move, [0]

        def move(before, after):
            pause(f"rename {count[0]}")
            count[0] += 1
            real(before, after)

        staging._move = move
        with CheckpointWriter(out, force=True) as writer:
            pause("begin")
            writer.add_bytes("config.json", b"new")
            writer.add_shard("model.safetensors", [PlannedTensor("a", "U8", (8_000_000,), chunks)])
            pause("before finish")
            writer.finish(index=True, manifest=lambda records: json.dumps({"files": list(records)}).encode())
            pause("after finish")

    def kill(stage, out):
        readable, writable = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(readable)
            write(stage, out, writable)
            os._exit(0)
        os.close(writable)
        os.read(readable, 1)  # returns at the pause, or when the child is done
        os.close(readable)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
    if len(sys.argv) == 2:
        write("in shard", Path(sys.argv[1]), 1)
    for stage, out in zip(sys.argv[1::2], sys.argv[2::2]):
        kill(stage, Path(out))
    """

STAGES = ["begin", "in shard", "before finish", *(f"rename {count}" for count in range(8)), "after finish"]
NEW = {CONFIG_NAME, MANIFEST_NAME, INDEX_NAME, "model.safetensors"}
OLD = {CONFIG_NAME, MANIFEST_NAME, INDEX_NAME, "old.txt"}


def run(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


def write_old(out: Path) -> None:
    with CheckpointWriter(out) as writer:
        writer.add_bytes(CONFIG_NAME, b"old")
        writer.add_bytes("old.txt", b"old")
        writer.finish(index=True, manifest=lambda records: json.dumps({"files": list(records)}).encode())


@pytest.mark.parametrize("kind", ["new", "old"])
def test_kill_leaves_nothing_that_looks_complete(tmp_path: Path, kind: str) -> None:
    """Killed at every stage: config.json is the old one with all the old files, or the new one with all the new
    files, or absent; a shard under its final name is whole; and the next run puts everything right."""
    folders = {stage: tmp_path / stage for stage in STAGES}
    if kind == "old":
        for out in folders.values():
            write_old(out)
    with run(*(part for stage, out in folders.items() for part in (stage, str(out)))) as driver:
        assert driver.wait() == 0
    outcomes = set()
    for stage, out in folders.items():
        names = {path.name for path in out.iterdir()} - {PROGRESS_NAME}
        shard = out / "model.safetensors"
        if shard.exists():
            with Shard(shard) as opened:
                assert opened.header.tensors["a"].nbytes == 8_000_000
        if CONFIG_NAME in names:
            outcome = (out / CONFIG_NAME).read_text()
            assert names == {"new": NEW, "old": OLD}[outcome], stage
        else:
            outcome = "nothing"
            assert (out / PROGRESS_NAME).is_dir(), stage
        outcomes.add(outcome)
        with CheckpointWriter(out, force=True) as writer:
            writer.add_bytes("again", b"")
            writer.finish()
        assert [path.name for path in out.iterdir()] == ["again"]
    assert outcomes == ({"nothing", "new"} if kind == "new" else {"old", "nothing", "new"})


def test_interrupt_cleans_up(tmp_path: Path) -> None:
    write_old(tmp_path / "out")
    with run(str(tmp_path / "out")) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"!"
        process.send_signal(signal.SIGINT)
    assert process.returncode != 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == OLD
    assert (tmp_path / "out" / CONFIG_NAME).read_bytes() == b"old"


FULL = """
    import resource, sys
    from pathlib import Path
    from espalier_format.container.planned_tensor import PlannedTensor
    from espalier_format.container.writer import CheckpointWriter
    from espalier_format.errors import WriteError

    limit, out = int(sys.argv[1]), Path(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    data = bytes(1_000_000)
    try:
        with CheckpointWriter(out, force=True) as writer:
            writer.add_shard("m.safetensors", [PlannedTensor("a", "U8", (20_000_000,), lambda: [data] * 20)])
            writer.finish()
    except WriteError as error:
        print(error.code, str(error).count("\\n"))
    """


@pytest.mark.parametrize("limit", [0, 5_000_000])
def test_write_error_when_the_file_size_limit_is_hit(tmp_path: Path, limit: int) -> None:
    """The kernel refuses in the middle of a file, as on a full disk; the old content stays."""
    out = tmp_path / "out"
    write_old(out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FULL), str(limit), str(out)], capture_output=True, text=True, check=True
    )
    assert result.stdout == "write-failed 0\n", result.stderr
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_write_error_on_a_full_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from espalier_format.container import writer as writer_module
    from espalier_format.errors import WriteError

    real = os.open
    monkeypatch.setattr(
        writer_module.os,
        "open",
        lambda path, *rest, **more: (
            real("/dev/full", os.O_WRONLY) if str(path).endswith(".partial") else real(path, *rest, **more)
        ),
    )

    def write(writer: CheckpointWriter) -> None:
        writer.add_bytes("x", b"1")
        writer.finish()

    with pytest.raises(WriteError, match="No space left"), CheckpointWriter(tmp_path / "out") as writer:
        write(writer)
    monkeypatch.undo()
    assert not (tmp_path / "out").exists()
