"""What the writer leaves behind: on success, on refusal, and when something fails on the way."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from espalier_format.container import staging as staging_module
from espalier_format.container import writer as writer_module
from espalier_format.container.folder import CheckpointFolder
from espalier_format.container.hashing import FileRecord
from espalier_format.container.index import INDEX_NAME, Index
from espalier_format.container.names import CONFIG_NAME, MANIFEST_NAME, PROGRESS_NAME
from espalier_format.container.planned_tensor import PlannedTensor
from espalier_format.container.shard import Shard
from espalier_format.container.writer import CheckpointWriter
from espalier_format.errors import (
    DtypeError,
    LimitError,
    MalformedError,
    MissingFileError,
    OutputExistsError,
    PathError,
    ShapeError,
    TruncatedError,
    UsageError,
    WriteError,
)


def planned(name: str, data: bytes, pieces: int = 1) -> PlannedTensor:
    step = max(1, -(-len(data) // pieces))
    return PlannedTensor(
        name, "U8", (len(data),), lambda: (data[start : start + step] for start in range(0, len(data), step))
    )


def manifest(records: Mapping[str, FileRecord]) -> bytes:
    return json.dumps({"files": {name: record.sha256 for name, record in records.items()}}).encode()


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder: name → content, None for folders."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def write_small(destination: Path, *, force: bool = False, text: bytes = b"{}") -> None:
    with CheckpointWriter(destination, force=force) as writer:
        writer.add_shard("model.safetensors", [planned("a", b"abcd")])
        writer.add_bytes(CONFIG_NAME, text)
        writer.finish(index=True, manifest=manifest)


def test_a_whole_checkpoint(tmp_path: Path, llama_exl3: Path) -> None:
    destination = tmp_path / "new" / "nested" / "out"
    seen: list[int] = []
    rng = np.random.default_rng(1)
    arrays = {f"t{index}": rng.integers(0, 255, size, np.uint8) for index, size in enumerate([0, 1, 7, 5_000_000, 3])}
    with CheckpointWriter(destination, sources=[llama_exl3], progress=seen.append) as writer:
        writer.add_shard(
            "model-00001-of-00002.safetensors",
            [planned(name, array.tobytes(), 3) for name, array in arrays.items()],
            {"format": "pt"},
        )
        writer.add_copy("model-00002-of-00002.safetensors", llama_exl3 / "model.safetensors")
        writer.add_copy("sub/tokenizer.json", llama_exl3 / "tokenizer.json")
        writer.add_bytes(CONFIG_NAME, b'{"x": 1}')
        assert [path.name for path in destination.iterdir()] == [PROGRESS_NAME]
        records = writer.finish(index=True, manifest=manifest)
    assert sorted(snapshot(destination)) == sorted(
        [
            "sub",
            "sub/tokenizer.json",
            CONFIG_NAME,
            MANIFEST_NAME,
            INDEX_NAME,
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        ]
    )
    for name, array in load_file(destination / "model-00001-of-00002.safetensors").items():
        assert array.tobytes() == arrays[name].tobytes()
    copied = (destination / "model-00002-of-00002.safetensors").read_bytes()
    assert copied == (llama_exl3 / "model.safetensors").read_bytes()
    assert (destination / CONFIG_NAME).read_bytes() == b'{"x": 1}'
    total = 0
    for name, record in records.items():
        data = (destination / name).read_bytes()
        total += len(data)
        assert record.size == len(data)
        assert record.sha256 == hashlib.sha256(data).hexdigest()
        assert record.git_blob_sha1 == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    assert sum(seen) == total
    listed = json.loads((destination / MANIFEST_NAME).read_text())["files"]
    assert listed == {name: record.sha256 for name, record in records.items() if name != MANIFEST_NAME}
    folder = CheckpointFolder(destination)
    index = Index.read(folder)
    assert index is not None
    headers = {}
    for name in folder.shard_names():
        with Shard(destination / name) as shard:
            headers[name] = shard.header
    assert index.compare(headers) == []


def test_shard_bytes_are_those_of_safetensors(tmp_path: Path) -> None:
    array = np.arange(30, dtype="<f4").reshape(5, 6)
    save_file({"a": array}, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add_shard(
            "ours.safetensors", [PlannedTensor("a", "F32", (5, 6), lambda: [memoryview(array)])], {"format": "pt"}
        )
        writer.finish()
    assert (tmp_path / "out" / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_unpadded_shard_round_trip(tmp_path: Path, qmoe_exl3: Path) -> None:
    with Shard(qmoe_exl3 / "model.safetensors") as shard, CheckpointWriter(tmp_path / "out") as writer:
        writer.add_shard(
            "model.safetensors",
            [
                PlannedTensor(info.name, info.dtype, info.shape, lambda i=info: shard.chunks(i.start, i.end, 1000))  # type: ignore[misc]
                for info in shard.header.tensors.values()
            ],
            pad=False,
        )
        writer.finish()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (qmoe_exl3 / "model.safetensors").read_bytes()


def test_index_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add_shard("model.safetensors", [planned("a", b"abcd")])
        writer.finish(index=b'{"weight_map":{}}')
    assert (tmp_path / "out" / INDEX_NAME).read_bytes() == b'{"weight_map":{}}'


def test_names_appear_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything, then the manifest, then the index, then what is marked last, then config.json."""
    order: list[str] = []
    real = staging_module._move

    def record(before: Path, after: Path) -> None:
        order.append(after.name)
        real(before, after)

    monkeypatch.setattr(staging_module, "_move", record)
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add_bytes(CONFIG_NAME, b"{}")
        writer.add_bytes("quantization_config.json", b"{}", last=True)
        writer.add_bytes("z.txt", b"")
        writer.add_shard("model.safetensors", [planned("a", b"abcd")])
        writer.finish(index=True, manifest=manifest)
    expected = ["model.safetensors", "z.txt", MANIFEST_NAME, INDEX_NAME, "quantization_config.json", CONFIG_NAME]
    assert order == expected


def test_modes_follow_the_umask_and_not_the_source(tmp_path: Path) -> None:
    source = tmp_path / "tool.sh"
    source.write_text("x")
    source.chmod(0o4755)
    before = os.umask(0o027)
    try:
        with CheckpointWriter(tmp_path / "out") as writer:
            writer.add_copy("tool.sh", source)
            writer.add_bytes("sub/x", b"")
            writer.finish()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out" / "tool.sh").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "out" / "sub").stat().st_mode) == 0o750


def test_many_small_tensors(tmp_path: Path) -> None:
    """More pieces than one writev takes, with empty ones between."""
    data = [bytes([index % 251]) * (index % 5) for index in range(5000)]
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add_shard("m.safetensors", [planned(f"{index:04d}", item) for index, item in enumerate(data)])
        records = writer.finish()
    raw = (tmp_path / "out" / "m.safetensors").read_bytes()
    assert raw.endswith(b"".join(data))
    assert records["m.safetensors"].sha256 == hashlib.sha256(raw).hexdigest()


def test_partial_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda descriptor, pieces: real(descriptor, [bytes(pieces[0])[:3]]))
    write_small(tmp_path / "out")
    monkeypatch.undo()
    write_small(tmp_path / "expected")
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "expected")


def test_memory_is_bounded(tmp_path: Path) -> None:
    """No more than the queue and a few pieces are alive at a time, however slow hashing is."""
    alive = threading.Semaphore(0)
    counts = {"live": 0, "most": 0}
    lock = threading.Lock()

    class Piece(bytearray):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            with lock:
                counts["live"] += 1
                counts["most"] = max(counts["most"], counts["live"])

        def __del__(self) -> None:
            with lock:
                counts["live"] -= 1

    size = 1 << 20
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add_shard(
            "m.safetensors", [PlannedTensor("a", "U8", (128 * size,), lambda: (Piece(size) for _ in range(128)))]
        )
        writer.finish()
    assert counts["most"] * size <= writer_module._QUEUED_BYTES + 3 * writer_module.CHUNK_BYTES
    assert not alive.acquire(blocking=False)


# What refuses the destination


def test_output_exists_error(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    for force in (False, True):
        with pytest.raises(OutputExistsError) as caught:
            CheckpointWriter(out, force=force)
        assert isinstance(caught.value, FileExistsError)
    assert snapshot(out) == {"precious": b"x"}


def test_output_exists_error_for_a_file_and_a_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        for force in (False, True):
            with pytest.raises(OutputExistsError):
                CheckpointWriter(tmp_path / name, force=force)
    with pytest.raises((OutputExistsError, WriteError)):
        CheckpointWriter(tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "x"


def test_output_exists_error_names_force_where_it_helps(tmp_path: Path) -> None:
    write_small(tmp_path / "out")
    with pytest.raises(OutputExistsError, match="--force"):
        CheckpointWriter(tmp_path / "out")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").touch()
    with pytest.raises(OutputExistsError) as caught:
        CheckpointWriter(tmp_path / "other")
    assert "--force" not in str(caught.value)


def test_output_exists_error_while_another_process_writes(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out") as first:
        first.add_bytes("x", b"1")
        with pytest.raises(OutputExistsError, match="another process"), CheckpointWriter(tmp_path / "out", force=True):
            pass
        first.finish()
    assert snapshot(tmp_path / "out") == {"x": b"1"}


def test_output_exists_error_when_the_destination_is_filled_meanwhile(tmp_path: Path) -> None:
    def fill(writer: CheckpointWriter) -> None:
        writer.add_bytes("x", b"1")
        (tmp_path / "out" / "precious").write_text("x")
        writer.finish()

    with pytest.raises(OutputExistsError), CheckpointWriter(tmp_path / "out") as writer:
        fill(writer)
    assert snapshot(tmp_path / "out") == {"precious": b"x"}


def test_output_exists_error_for_a_linked_marker(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "precious").write_text("x")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / PROGRESS_NAME).symlink_to("../victim")
    with pytest.raises(OutputExistsError), CheckpointWriter(tmp_path / "out", force=True):
        pass
    assert snapshot(tmp_path / "victim") == {"precious": b"x"}


@pytest.mark.parametrize("destination", ["src", "src/sub", ".", "link", "src/../src"])
def test_usage_error_when_source_and_destination_meet(tmp_path: Path, destination: str) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / MANIFEST_NAME).touch()
    (tmp_path / "link").symlink_to("src")
    before = snapshot(tmp_path)
    with pytest.raises(UsageError):
        CheckpointWriter(tmp_path / destination, force=True, sources=[tmp_path / "src"])
    assert snapshot(tmp_path) == before


def test_usage_error_when_the_source_is_a_file_in_the_destination(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).touch()
    (tmp_path / "x.safetensors").touch()
    with pytest.raises(UsageError):
        CheckpointWriter(tmp_path, force=True, sources=[tmp_path / "x.safetensors"])


def test_destination_may_be_relative_empty_or_a_link_to_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    monkeypatch.chdir(tmp_path)
    write_small(Path("link"))
    assert (tmp_path / "link").is_symlink()
    write_small(Path("relative"))
    assert snapshot(tmp_path / "relative") == snapshot(tmp_path / "empty")
    assert CONFIG_NAME in snapshot(tmp_path / "empty")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write_small(Path())
    assert CONFIG_NAME in snapshot(tmp_path / "here")


# Replacing


def test_force_replaces_our_own_output(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_small(out)
    (out / ".git").mkdir()
    (out / ".git" / "HEAD").write_text("ref")
    with CheckpointWriter(out, force=True) as writer:
        writer.add_bytes(CONFIG_NAME, b"new")
        assert (out / CONFIG_NAME).read_bytes() == b"{}"
        assert (out / "model.safetensors").exists()
        writer.finish(manifest=manifest)
    assert sorted(snapshot(out)) == [".git", ".git/HEAD", CONFIG_NAME, MANIFEST_NAME]
    assert (out / CONFIG_NAME).read_bytes() == b"new"


def test_force_replaces_what_an_interrupted_run_left(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / PROGRESS_NAME / "discarded").mkdir(parents=True)
    (out / PROGRESS_NAME / "000001.partial").write_text("half")
    (out / PROGRESS_NAME / "discarded" / "x").touch()
    (out / PROGRESS_NAME / "names.json").write_text('{"files": ["model.safetensors"]}')
    (out / "model.safetensors").touch()
    with pytest.raises(OutputExistsError, match="--force"):
        CheckpointWriter(out)
    write_small(out, force=True)
    write_small(tmp_path / "expected")
    assert snapshot(out) == snapshot(tmp_path / "expected")


@pytest.mark.parametrize("name", ["notes.txt", "sub/a.txt", "sub/.hidden/a", ".DS_Store", "link"])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_force_refuses_to_remove_what_others_wrote(tmp_path: Path, name: str, when: str) -> None:
    """Wherever it lies, and also when it comes while the output is written."""
    out = tmp_path / "out"
    write_small(out)

    def add() -> None:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        if name == "link":
            (out / name).symlink_to(tmp_path)
        else:
            (out / name).write_text("mine")

    if when == "before":
        add()

    def run() -> None:
        with CheckpointWriter(out, force=True) as writer:
            writer.add_bytes(CONFIG_NAME, b"new")
            add()
            writer.finish(manifest=manifest)

    with pytest.raises(OutputExistsError, match="did not write") as caught:
        run()
    assert name in str(caught.value)
    left = snapshot(out)
    assert left.pop(name) == (None if name == "link" else b"mine")
    write_small(tmp_path / "expected")
    assert {key for key in left if not name.startswith(key)} == set(snapshot(tmp_path / "expected"))
    assert (out / CONFIG_NAME).read_bytes() == b"{}"


def test_force_keeps_what_people_edit(tmp_path: Path) -> None:
    """README.md and .gitattributes stand in no manifest; they stay, also where the output has such a file."""
    out = tmp_path / "out"
    with CheckpointWriter(out) as writer:
        writer.add_bytes("README.md", b"from the source")
        writer.add_bytes("sub/old", b"")
        writer.finish(manifest=manifest)
    (out / "README.md").write_text("mine")
    (out / ".gitattributes").write_text("mine")
    with CheckpointWriter(out, force=True) as writer:
        writer.add_bytes("README.md", b"from the source")
        writer.add_bytes("new", b"")
        writer.finish(manifest=manifest)
    assert sorted(snapshot(out)) == [".gitattributes", "README.md", MANIFEST_NAME, "new"]
    assert (out / "README.md").read_text() == (out / ".gitattributes").read_text() == "mine"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": 1}'])
def test_force_refuses_what_no_manifest_vouches_for(tmp_path: Path, text: str) -> None:
    write_small(tmp_path / "out")
    (tmp_path / "out" / MANIFEST_NAME).write_text(text)
    before = snapshot(tmp_path)
    with pytest.raises(OutputExistsError, match="cannot be read"):
        CheckpointWriter(tmp_path / "out", force=True)
    assert snapshot(tmp_path) == before


class BoomError(Exception):
    pass


def failing() -> Iterator[bytes]:
    yield b"ab"
    raise BoomError


def fail_in_chunks(writer: CheckpointWriter) -> None:
    writer.add_shard("m.safetensors", [PlannedTensor("a", "U8", (4,), failing)])


def fail_by_interrupt(writer: CheckpointWriter) -> None:
    writer.add_bytes("x", b"1")
    raise KeyboardInterrupt


def fail_in_manifest(writer: CheckpointWriter) -> None:
    def raising(records: Mapping[str, FileRecord]) -> bytes:
        raise BoomError

    writer.add_bytes(CONFIG_NAME, b"new")
    writer.finish(manifest=raising)


def too_few_bytes(writer: CheckpointWriter) -> None:
    writer.add_shard("m.safetensors", [PlannedTensor("a", "U8", (4,), lambda: [b"abc"])])


def too_many_bytes(writer: CheckpointWriter) -> None:
    writer.add_shard("m.safetensors", [PlannedTensor("a", "U8", (4,), lambda: [b"abc", b"de"])])


def missing_source(writer: CheckpointWriter) -> None:
    writer.add_copy("x", Path("/nonexistent/file"))


def not_finished(writer: CheckpointWriter) -> None:
    writer.add_bytes(CONFIG_NAME, b"new")


def failure_that_is_caught(writer: CheckpointWriter) -> None:
    with pytest.raises(ShapeError):
        too_few_bytes(writer)
    writer.finish()


FAILURES: list[tuple[Callable[[CheckpointWriter], None], type[BaseException] | None]] = [
    (fail_in_chunks, BoomError),
    (fail_by_interrupt, KeyboardInterrupt),
    (fail_in_manifest, BoomError),
    (too_few_bytes, ShapeError),
    (too_many_bytes, ShapeError),
    (missing_source, MissingFileError),
    (not_finished, None),
    (failure_that_is_caught, UsageError),
]


@pytest.mark.parametrize(("fail", "error"), FAILURES, ids=[fail.__name__ for fail, _ in FAILURES])
@pytest.mark.parametrize("kind", ["new", "empty", "old"])
def test_failure_leaves_the_destination_as_it_was(
    tmp_path: Path, kind: str, fail: Callable[[CheckpointWriter], None], error: type[BaseException] | None
) -> None:
    out = tmp_path / "parent" / "out"
    if kind == "empty":
        out.mkdir(parents=True)
    elif kind == "old":
        write_small(out, text=b"old")
    before = snapshot(tmp_path)

    def run() -> None:
        with CheckpointWriter(out, force=True) as writer:
            writer.add_bytes("first", b"1")
            fail(writer)

    if error is None:
        run()
    else:
        with pytest.raises(error):
            run()
    assert snapshot(tmp_path) == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("espalier-hash")]


@pytest.mark.parametrize("kind", ["new", "old"])
def test_write_error_at_any_rename_rolls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Fails at the 1st, 2nd … rename of the commit, until it succeeds."""
    out = tmp_path / "out"
    if kind == "old":
        with CheckpointWriter(out) as writer:
            writer.add_bytes(CONFIG_NAME, b"old")
            writer.add_bytes("sub/old", b"old")
            writer.finish(index=True, manifest=manifest)
    before = snapshot(tmp_path)
    real = staging_module._move
    for fatal in range(1, 20):
        left = [fatal]

        def move(first: Path, second: Path, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise OSError(5, "Input/output error")
            real(first, second)

        monkeypatch.setattr(staging_module, "_move", move)
        try:
            with CheckpointWriter(out, force=True) as writer:
                writer.add_bytes(CONFIG_NAME, b"new")
                writer.add_bytes("sub/new", b"new")
                writer.finish(manifest=manifest)
        except WriteError:
            assert snapshot(tmp_path) == before
        else:
            assert sorted(snapshot(out)) == [CONFIG_NAME, MANIFEST_NAME, "sub", "sub/new"]
            assert fatal > 3
            return
    pytest.fail("never succeeded")


@pytest.mark.parametrize("call", ["writev", "fsync", "open", "mkdir"])
def test_write_error_for_what_the_operating_system_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    out = tmp_path / "out"
    write_small(out)
    before = snapshot(tmp_path)
    real_open, real_mkdir = os.open, os.mkdir

    def refuse(*arguments: object, **options: object) -> int:
        if call == "open" and not str(arguments[0]).endswith(".partial"):
            return real_open(*arguments, **options)  # type: ignore[arg-type]
        if call == "mkdir" and not str(arguments[0]).endswith(PROGRESS_NAME):
            real_mkdir(*arguments, **options)  # type: ignore[arg-type]
            return 0
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(WriteError, match="No space left") as caught:
        write_small(out, force=True)
    monkeypatch.undo()
    assert caught.value.code == "write-failed"
    assert snapshot(tmp_path) == before


def write_files(writer: CheckpointWriter, *names: str) -> None:
    for name in names:
        writer.add_bytes(name, b"1")
    writer.finish()


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b/c", "a/b"), ("a/b", "a/b/c/d")])
def test_usage_error_for_a_file_and_a_folder_of_one_name(tmp_path: Path, names: tuple[str, str]) -> None:
    """Before anything of the second file is written, and not by the rename at the end."""
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add_bytes(names[0], b"1")
        with pytest.raises(UsageError, match="both a file and a folder"):
            writer.add_bytes(names[1], b"1")
    assert snapshot(tmp_path) == {}


# What refuses the content


@pytest.mark.parametrize(
    "name",
    ["../x", "/x", "a/../../x", "a\\b", "", ".git/x", f"{PROGRESS_NAME}/lock", "n" * 256, "a/" * 40 + "b"],
    ids=lambda name: name[:12],
)
def test_path_error(tmp_path: Path, name: str) -> None:
    source = tmp_path / "source"
    source.touch()
    calls: list[Callable[[CheckpointWriter], None]] = [
        lambda writer: writer.add_bytes(name, b""),
        lambda writer: writer.add_copy(name, source),
        lambda writer: writer.add_shard(name, []),
    ]
    for call in calls:
        with pytest.raises(PathError), CheckpointWriter(tmp_path / "out") as writer:
            call(writer)
    assert snapshot(tmp_path) == {"source": b""}


def test_usage_errors(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add_bytes("x", b"1")
        with pytest.raises(UsageError, match="twice"):
            writer.add_bytes("x", b"2")
        writer.finish()
        with pytest.raises(UsageError):
            writer.finish()
    with pytest.raises(UsageError):
        writer.add_bytes("y", b"1")
    with pytest.raises(UsageError), writer:
        pass
    with pytest.raises(UsageError):
        CheckpointWriter(tmp_path / "other").add_bytes("x", b"")
    assert snapshot(tmp_path) == {"out": None, "out/x": b"1"}


def test_errors_of_the_header(tmp_path: Path) -> None:
    cases = [
        ([planned("a", b"1"), planned("a", b"1")], MalformedError),
        ([planned("__metadata__", b"1")], MalformedError),
        ([PlannedTensor("a", "FP4", (1,), lambda: [b"1"])], DtypeError),
        ([planned("x" * 60_000 + str(index), b"") for index in range(420)], LimitError),
    ]
    for tensors, error in cases:
        with pytest.raises(error), CheckpointWriter(tmp_path / "out") as writer:
            writer.add_shard("m.safetensors", tensors)
    assert snapshot(tmp_path) == {}


def test_copying_a_broken_shard_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "m.safetensors"
    source.write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(TruncatedError), CheckpointWriter(tmp_path / "out") as writer:
        writer.add_copy("m.safetensors", source)
    assert not (tmp_path / "out").exists()


def test_hidden_shards_are_copied_and_not_indexed(tmp_path: Path) -> None:
    """What no reader takes for a shard, such as the AppleDouble file beside one, is none for the writer."""
    source = tmp_path / "source"
    source.write_bytes(b"no safetensors")
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add_copy("._model.safetensors", source)
        writer.add_shard("model.safetensors", [planned("a", b"1")])
        writer.add_shard(".old.safetensors", [planned("b", b"1")])
        writer.finish(index=True)
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    assert index == {"metadata": {"total_size": 1}, "weight_map": {"a": "model.safetensors"}}
    assert (tmp_path / "out" / "._model.safetensors").read_bytes() == b"no safetensors"


def test_usage_error_for_a_tensor_in_two_shards(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add_shard("1.safetensors", [planned("a", b"1")])
        with pytest.raises(UsageError, match=r"two shards.*1\.safetensors and 2\.safetensors"):
            writer.add_shard("2.safetensors", [planned("a", b"1")])
        with pytest.raises(UsageError):
            writer.finish()


def test_usage_error_for_an_empty_path() -> None:
    with pytest.raises(UsageError, match="empty"):
        CheckpointWriter("")


def test_files_that_wait_for_the_disk_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint may come with thousands of small files, and a process may have 256 open."""
    monkeypatch.setattr(os, "fsync", lambda _: time.sleep(0.002))
    most = 0
    with CheckpointWriter(tmp_path / "out") as writer:
        for number in range(100):
            writer.add_bytes(f"{number}.txt", b"x")
            most = max(most, len(writer._open))
        assert len(writer.finish()) == 100
    assert 1 < most <= 33


def test_a_descriptor_is_forgotten_before_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is closed, the next file may get the same number in the other thread."""
    with CheckpointWriter(tmp_path / "out") as writer:
        real, seen = os.close, []

        def close(descriptor: int) -> None:
            seen.append(descriptor in writer._open)
            real(descriptor)

        monkeypatch.setattr(os, "close", close)
        writer.add_bytes("x", b"1")
        assert writer.records["x"].size == 1
        monkeypatch.undo()
    assert seen == [False]
