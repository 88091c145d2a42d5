"""Interruptions: whatever stops a conversion, no finished file is lost, and the result is the same.

Processes are really killed. Power loss is not simulated.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Exl3Module, Tensor, exl3_draft, llama_config, llama_modules
from convert_cases import PAIRS, SHARD_BYTES, content, exl3_source, make_source, run_conversion
from quantize_cases import dense_draft, fake_encode_module, fake_sample_errors

from espalier_format.container import staging
from espalier_format.errors import OutputExistsError, ScaleOverflowError, UsageError, WriteError
from espalier_format.operations.convert import convert_checkpoint
from espalier_format.operations.quantize import quantize_checkpoint
from espalier_format.operations.verify import verify_checkpoint
from espalier_format.progress import NullProgress

SCRIPT = """
    import os, signal, sys, time, traceback
    from pathlib import Path
    from convert_cases import content, run_conversion
    from espalier_format.errors import OutputExistsError
    from espalier_format.progress import NullProgress

    pair, source, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    first, step = int(sys.argv[4]), int(sys.argv[5])
    EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")

    def run(out, stop, **options):
        "Convert, killed just before the stop-th time that something at the destination is opened, renamed, written."
        child = os.fork()
        if child == 0:
            count = [0]

            def step():
                count[0] += 1
                if count[0] == stop:
                    os.kill(os.getpid(), signal.SIGKILL)

            class Watched(NullProgress):
                def advance(self, n_bytes):
                    time.sleep(0.005)  # or the other threads finish nothing before the end
                    step()

            def watch(event, arguments):
                if event in EVENTS and str(out) in str(arguments[0]):
                    step()

            sys.addaudithook(watch)
            try:
                resumed = run_conversion(pair, source, out, progress=Watched(), **options)
            except OutputExistsError as error:
                if "another process" in str(error):
                    os._exit(6)  # some kernels release the lock of a killed process a little later
                print(error, *out.rglob("*"), file=sys.stderr, flush=True)
                os._exit(8)
            except BaseException:
                traceback.print_exc()
                os._exit(9)
            os._exit(100 + resumed)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == 6:
            time.sleep(0.1)
            return run(out, stop, **options)
        return os.waitstatus_to_exitcode(status)

    whole = folder / "whole"
    assert run(whole, 0) == 100
    expected = content(whole)
    stop, outcomes = first, set()
    while True:
        out = folder / f"stop-{stop}"
        status = run(out, stop)
        if status == 100:
            break  # it came to its end before
        assert status == -signal.SIGKILL, status
        if (out / "config.json").exists():
            assert content(out) == expected, stop
            outcomes.add("complete")
        else:
            status = run(out, 0, resume=True)
            assert status >= 100, (stop, status)
            outcomes.add(f"resumed {status - 100}")
            assert content(out) == expected, stop
            assert not (out / ".espalier-in-progress").exists()
        stop += step
    # One output that is killed again and again, each run a little later than the one before.
    out, stop, runs = folder / "again", 9, 0
    while not (out / "config.json").exists():
        status = run(out, stop, resume=True)
        assert status in (-signal.SIGKILL, *range(100, 110)), status
        stop, runs = stop + 7, runs + 1
    assert content(out) == expected
    print(stop, runs, *sorted(outcomes), sep=",")
    """


def _run_script(pair: str, folder: Path, first: int, step: int) -> list[str]:
    source = make_source(pair, folder / "m")
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), pair, *map(str, (source, folder, first, step))],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip().split(",")


@pytest.mark.parametrize("pair", PAIRS)
def test_killed_at_many_moments(pair: str, tmp_path: Path) -> None:
    _, runs, *outcomes = _run_script(pair, tmp_path, 3, 13)
    assert "resumed 0" in outcomes
    assert len(outcomes) > 1  # threads, and how busy the machine is, decide how much is finished at a moment
    assert int(runs) > 2


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
def test_killed_at_every_moment(pair: str, tmp_path: Path) -> None:
    _, _, *outcomes = _run_script(pair, tmp_path, 1, 1)
    assert {"complete", "resumed 0"} <= set(outcomes)
    assert len(outcomes) > 4


class _Stopping(NullProgress):
    """Stops the conversion when ``stop`` bytes have been written."""

    def __init__(self, stop: int, error: BaseException) -> None:
        self._left = stop
        self._error = error

    def advance(self, n_bytes: int) -> None:
        self._left -= n_bytes
        if self._left < 0:
            raise self._error


def _staged(out: Path) -> dict[int, int]:
    """Inodes of the files that are kept, with the time of their last change."""
    kept = (out / ".espalier-in-progress" / "work" / "files").iterdir()
    return {path.stat().st_ino: path.stat().st_mtime_ns for path in kept}


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def source(pair: str, tmp_path: Path) -> Path:
    return make_source(pair, tmp_path / "m")


def _interrupt(pair: str, source: Path, out: Path, stop: int = 150_000, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_conversion(pair, source, out, progress=_Stopping(stop, KeyboardInterrupt()), **options)
    assert not (out / "config.json").exists()


def test_finished_files_are_not_written_again(pair: str, source: Path, tmp_path: Path) -> None:
    run_conversion(pair, source, tmp_path / "whole")
    _interrupt(pair, source, tmp_path / "out")
    kept = _staged(tmp_path / "out")
    assert len(kept) >= 2
    assert run_conversion(pair, source, tmp_path / "out", resume=True) == len(kept)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    written = {path.stat().st_ino: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert kept.items() <= written.items()
    assert not (tmp_path / "out" / ".espalier-in-progress").exists()


def test_progress_adds_up_when_files_are_taken_over(pair: str, source: Path, tmp_path: Path) -> None:
    class Recorder(NullProgress):
        done = total = 0

        def start(self, total_bytes: int, label: str) -> None:
            self.total = total_bytes

        def advance(self, n_bytes: int) -> None:
            self.done += n_bytes

    _interrupt(pair, source, tmp_path / "out")
    recorder = Recorder()
    assert run_conversion(pair, source, tmp_path / "out", resume=True, progress=recorder) >= 2
    assert recorder.done == recorder.total > 0


def test_an_unfinished_output_is_not_taken_over_silently(pair: str, source: Path, tmp_path: Path) -> None:
    _interrupt(pair, source, tmp_path / "out")
    kept = _staged(tmp_path / "out")
    with pytest.raises(OutputExistsError, match="--resume goes on with it, --force alone begins anew"):
        run_conversion(pair, source, tmp_path / "out")
    assert _staged(tmp_path / "out") == kept
    assert run_conversion(pair, source, tmp_path / "out", force=True) == 0


def test_resume_without_anything_to_resume_begins(pair: str, source: Path, tmp_path: Path) -> None:
    assert run_conversion(pair, source, tmp_path / "out", resume=True) == 0
    with pytest.raises(OutputExistsError, match="is not empty"):
        run_conversion(pair, source, tmp_path / "out", resume=True)


def test_an_interruption_before_anything_is_finished_leaves_nothing(pair: str, source: Path, tmp_path: Path) -> None:
    _interrupt(pair, source, tmp_path / "deep" / "out", 0)
    assert not (tmp_path / "deep").exists()


def _change_shard(source: Path) -> None:
    shard = next(source.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def _change_config(source: Path) -> None:
    (source / "config.json").write_text((source / "config.json").read_text() + "\n")


def _change_other(source: Path) -> None:
    (source / "extra" / "notes.txt").write_bytes(b"NOTES")


def _add_other(source: Path) -> None:
    (source / "extra" / "more.txt").write_bytes(b"")


@pytest.mark.parametrize("change", [_change_shard, _change_config, _change_other, _add_other])
def test_another_source_is_refused(change: Callable[[Path], None], tmp_path: Path) -> None:
    source, out = exl3_source(tmp_path / "m"), tmp_path / "out"
    _interrupt(PAIRS[0], source, out)
    kept = _staged(out)
    change(source)
    with pytest.raises(UsageError, match=r"was begun with another source; --force begins anew$"):
        convert_checkpoint(source, out, to="espalier", resume=True)
    assert _staged(out) == kept  # nothing was lost by trying
    assert convert_checkpoint(source, out, to="espalier", force=True).resumed == 0
    assert verify_checkpoint(out, deep=True).exit_code == 0


def test_other_options_are_refused(tmp_path: Path) -> None:
    source, out = exl3_source(tmp_path / "m"), tmp_path / "out"
    _interrupt("exl3 to hf", source, out)
    with pytest.raises(UsageError, match=r"begun with another dtype \(source, now float32\);"):
        run_conversion("exl3 to hf", source, out, resume=True, dtype="fp32")
    with pytest.raises(UsageError, match=r"begun with another shard size \([0-9]+, now [0-9]+\);"):
        convert_checkpoint(source, out, to="hf", resume=True)
    with pytest.raises(
        UsageError, match=r"another format \(hf, now espalier\) and another dtype and another shard size;"
    ):
        convert_checkpoint(source, out, to="espalier", resume=True)
    assert run_conversion("exl3 to hf", source, out, resume=True) > 0


@pytest.mark.parametrize("names", [("bf16", "bfloat16"), ("bfloat16", "bf16")])
def test_another_spelling_of_an_option_is_the_same(names: tuple[Any, Any], tmp_path: Path) -> None:
    source, out = exl3_source(tmp_path / "m"), tmp_path / "out"
    _interrupt("exl3 to hf", source, out, dtype=names[0])
    assert run_conversion("exl3 to hf", source, out, resume=True, dtype=names[1]) > 0


def test_another_command_does_not_go_on_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = exl3_source(tmp_path / "m")
    _interrupt(PAIRS[0], source, tmp_path / "a")
    with pytest.raises(UsageError, match=r"begun with another command \(convert, now quantize\); --force begins anew"):
        quantize_checkpoint(source, tmp_path / "a", bits=2, resume=True)
    assert run_conversion(PAIRS[0], source, tmp_path / "a", resume=True) > 0

    def encode(*arguments: Any, **options: Any) -> Any:
        if options["name"].endswith("v_proj"):
            raise KeyboardInterrupt
        return fake_encode_module(*arguments, **options)

    monkeypatch.setattr("espalier_format.quantize.encode.encode_module", encode)
    monkeypatch.setattr("espalier_format.quantize.measure.sample_errors", fake_sample_errors)
    plain = dense_draft().write(tmp_path / "plain")
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(plain, tmp_path / "b", bits=2)
    with pytest.raises(UsageError, match=r"begun with another command \(quantize, now convert\); --force begins anew"):
        convert_checkpoint(source, tmp_path / "b", to="espalier", resume=True)
    monkeypatch.setattr("espalier_format.quantize.encode.encode_module", fake_encode_module)
    assert quantize_checkpoint(plain, tmp_path / "b", bits=2, resume=True).resumed > 0


def test_spoilt_files_are_written_again(pair: str, source: Path, tmp_path: Path) -> None:
    run_conversion(pair, source, tmp_path / "whole")
    _interrupt(pair, source, tmp_path / "out", 200_000 if "exl3" in pair else 150_000)
    work = tmp_path / "out" / ".espalier-in-progress" / "work"
    files = sorted((work / "files").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    flipped = bytearray(files[0].read_bytes())
    flipped[-1] ^= 1
    files[0].write_bytes(flipped)
    files[1].write_bytes(files[1].read_bytes()[:-1])
    (work / "files" / "stray.partial").write_bytes(b"half")
    assert run_conversion(pair, source, tmp_path / "out", resume=True) == len(files) - 2
    assert content(tmp_path / "out") == content(tmp_path / "whole")


@pytest.mark.parametrize("cut", [1, 30, 100_000])
def test_a_journal_that_was_cut_short(cut: int, tmp_path: Path) -> None:
    source, out = exl3_source(tmp_path / "m"), tmp_path / "out"
    convert_checkpoint(source, tmp_path / "whole", to="espalier")
    _interrupt(PAIRS[0], source, out, 200_000)
    kept = len(_staged(out))
    journal = out / ".espalier-in-progress" / "work" / "finished.jsonl"
    journal.write_bytes(journal.read_bytes()[:-cut])
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    again = _Stopping(size - 100, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):  # what is appended now must not be lost behind half a line
        convert_checkpoint(source, out, to="espalier", resume=True, progress=again)
    assert len(_staged(out)) >= kept
    assert convert_checkpoint(source, out, to="espalier", resume=True).resumed >= kept
    assert content(out) == content(tmp_path / "whole")


def test_a_full_disk_loses_nothing(pair: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_conversion(pair, source, tmp_path / "whole")
    calls = [0]
    real = os.fsync

    def full(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] % 6 == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    kept: list[int] = []
    for _ in range(50):
        try:
            run_conversion(pair, source, tmp_path / "out", resume=True)
            break
        except WriteError as error:
            assert "No space left" in str(error)  # noqa: PT017 - one of many attempts
            kept.append(len(_staged(tmp_path / "out")) if (tmp_path / "out").exists() else 0)
            calls[0] += 1
    monkeypatch.setattr(os, "fsync", real)
    if not (tmp_path / "out" / "config.json").exists():
        run_conversion(pair, source, tmp_path / "out", resume=True)
    assert len(kept) > 1
    assert kept == sorted(kept)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


@pytest.mark.parametrize("finished", [0, 1, 2])
def test_the_message_of_a_full_disk_says_what_is_kept(
    finished: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that fails is none of the finished ones, and without any there is nothing to go on with."""
    modules = [Exl3Module(name, inputs, outputs, 2) for name, inputs, outputs in llama_modules()]
    source = exl3_draft(modules, num_shards=4, config=llama_config()).write(tmp_path / "m")
    real, opened = os.open, list[str]()

    def full(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if str(path).endswith(".partial") and flags & os.O_EXCL and f"{os.sep}files{os.sep}" in str(path):
            opened.append(str(path))
            if len(opened) > finished:
                raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(WriteError, match="No space left on device; ") as caught:
        convert_checkpoint(source, tmp_path / "out", to="espalier")
    kept = "what is finished is kept, and --resume goes on from there"
    assert (kept in str(caught.value)) is bool(finished)
    assert ("what was written has been removed" in str(caught.value)) is not bool(finished)
    assert (tmp_path / "out").exists() is bool(finished)
    monkeypatch.setattr(os, "open", real)
    assert convert_checkpoint(source, tmp_path / "out", to="espalier", resume=True).resumed == finished


def test_the_message_of_a_commit_that_fails_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files are finished then, and none has to be written again."""
    source = exl3_source(tmp_path / "m")
    real = staging._move

    def fails(old: Path, new: Path) -> None:
        if new.name == "config.json":
            raise OSError(errno.EIO, "Input/output error")
        real(old, new)

    monkeypatch.setattr(staging, "_move", fails)
    with pytest.raises(WriteError, match="Input/output error; what is finished is kept, and --resume goes on"):
        convert_checkpoint(source, tmp_path / "out", to="espalier")
    monkeypatch.setattr(staging, "_move", real)
    assert convert_checkpoint(source, tmp_path / "out", to="espalier", resume=True).resumed > 0


def test_an_output_that_cannot_begin_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.mkdir

    def full(path: Path, *rest: Any, **more: Any) -> None:
        if path.name == "files":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, *rest, **more)

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(WriteError, match="No space left on device; what was written has been removed"):
        convert_checkpoint(exl3_source(tmp_path / "m"), tmp_path / "out", to="espalier")
    assert not (tmp_path / "out").exists()


def test_a_source_that_cannot_be_converted_leaves_nothing(tmp_path: Path) -> None:
    """Another run would fail in the same way."""
    modules = [Exl3Module(name, inputs, outputs, 2) for name, inputs, outputs in llama_modules()]
    draft = exl3_draft(modules, num_shards=4, config=llama_config(tie_word_embeddings=True))
    for kind in ("suh", "svh"):
        name = f"{modules[-1].name}.{kind}"
        draft[name] = Tensor.of(np.full(draft[name].shape, 60000), "F16")
    source = draft.write(tmp_path / "m")
    written: list[int] = []

    class Counting(NullProgress):
        def advance(self, n_bytes: int) -> None:
            written.append(n_bytes)

    with pytest.raises(ScaleOverflowError):
        run_conversion("exl3 to hf", source, tmp_path / "out", dtype="fp16", progress=Counting())
    assert sum(written) > 2 * SHARD_BYTES
    assert not (tmp_path / "out").exists()


def test_an_old_output_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    source, out = exl3_source(tmp_path / "m"), tmp_path / "out"
    convert_checkpoint(source, out, to="hf", dtype="fp32")
    before = content(out)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, out, to="espalier", force=True, progress=_Stopping(150_000, KeyboardInterrupt()))
    assert content(out) == before
    with pytest.raises(OutputExistsError, match="--force"):
        convert_checkpoint(source, out, to="espalier", resume=True)
    assert convert_checkpoint(source, out, to="espalier", force=True, resume=True).resumed > 0
    convert_checkpoint(source, tmp_path / "whole", to="espalier")
    assert content(out) == content(tmp_path / "whole")


def _unfinished(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Return a source, an unfinished output of it, and the workspace of that."""
    source, out = exl3_source(tmp_path / "m"), tmp_path / "out"
    _interrupt(PAIRS[0], source, out, 200_000)
    return source, out, out / ".espalier-in-progress" / "work"


def _tree(folder: Path) -> dict[str, bytes | str]:
    found: dict[str, bytes | str] = {}
    for path in folder.rglob("*"):
        if path.is_symlink():
            found[str(path)] = str(path.readlink())
        elif path.name != "lock":
            found[str(path)] = path.read_bytes() if path.is_file() else "folder"
    return found


@pytest.mark.parametrize("job", [True, False])
@pytest.mark.parametrize("name", ["", "files", "job.json", "finished.jsonl"])
@pytest.mark.parametrize("dangling", [True, False])
def test_nothing_is_changed_through_a_link(name: str, job: bool, dangling: bool, tmp_path: Path) -> None:
    source, out, work = _unfinished(tmp_path)
    if not job:
        (work / "job.json").unlink()
    elsewhere = tmp_path / "elsewhere"
    place = work / name
    if place.exists():
        place.rename(elsewhere)
    if dangling:
        elsewhere = tmp_path / "nowhere"
    elif not elsewhere.exists():
        elsewhere.write_text("theirs")
    elif elsewhere.is_dir():
        (elsewhere / "deep").mkdir()
        (elsewhere / "deep" / "data").write_text("theirs")
    place.symlink_to(elsewhere)
    before = _tree(tmp_path)
    with pytest.raises(OutputExistsError, match="is a link, and not ours; move it away"):
        convert_checkpoint(source, out, to="espalier", resume=True)
    assert _tree(tmp_path) == before


@pytest.mark.parametrize("name", ["files", "job.json", "finished.jsonl"])
def test_what_is_of_another_kind_is_refused(name: str, tmp_path: Path) -> None:
    source, out, work = _unfinished(tmp_path)
    (work / name).rename(tmp_path / "moved")
    if name == "files":
        (work / name).write_text("theirs")
    else:
        (work / name).mkdir()
    before = _tree(tmp_path)
    with pytest.raises(OutputExistsError, match=r"is (no folder|not a regular file), and not ours; move it away"):
        convert_checkpoint(source, out, to="espalier", resume=True)
    assert _tree(tmp_path) == before


def test_a_folder_in_the_place_of_a_finished_file_is_refused(tmp_path: Path) -> None:
    source, out, work = _unfinished(tmp_path)
    convert_checkpoint(source, tmp_path / "whole", to="espalier")
    place = next((work / "files").iterdir())
    place.unlink()
    place.mkdir()
    (place / "data").write_text("theirs")
    before = _tree(out)
    with pytest.raises(OutputExistsError, match=r"\.partial: is a folder, and not ours; move it away$"):
        convert_checkpoint(source, out, to="espalier", resume=True)
    assert _tree(out) == before
    place.rename(tmp_path / "away")  # what the message asks for is enough
    assert convert_checkpoint(source, out, to="espalier", resume=True).resumed > 0
    assert content(out) == content(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["link", "second name"])
def test_a_finished_file_that_is_elsewhere_too_is_written_again(kind: str, tmp_path: Path) -> None:
    source, out, work = _unfinished(tmp_path)
    convert_checkpoint(source, tmp_path / "whole", to="espalier")
    files = list((work / "files").iterdir())
    elsewhere = tmp_path / "elsewhere"
    if kind == "link":
        files[0].rename(elsewhere)
        files[0].symlink_to(elsewhere)
    else:
        elsewhere.hardlink_to(files[0])
    data = elsewhere.read_bytes()
    assert convert_checkpoint(source, out, to="espalier", resume=True).resumed == len(files) - 1
    assert content(out) == content(tmp_path / "whole")
    assert elsewhere.read_bytes() == data
    assert elsewhere.stat().st_nlink == 1
    assert not any(path.is_symlink() for path in out.rglob("*"))


def test_a_journal_with_a_second_name_is_not_appended_to(tmp_path: Path) -> None:
    source, out, work = _unfinished(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.hardlink_to(work / "finished.jsonl")
    data = elsewhere.read_bytes()
    assert convert_checkpoint(source, out, to="espalier", resume=True).resumed > 0
    assert elsewhere.read_bytes() == data


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 5000, "\udcff"])
def test_a_job_that_is_no_json_of_ours_is_another_one(text: str, tmp_path: Path) -> None:
    source, out, work = _unfinished(tmp_path)
    (work / "job.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    before = _tree(out)
    with pytest.raises(UsageError, match=r"job.json is damaged\); --force begins anew"):
        convert_checkpoint(source, out, to="espalier", resume=True)
    assert _tree(out) == before


def test_a_journal_line_of_any_depth_ends_the_journal(tmp_path: Path) -> None:
    source, out, work = _unfinished(tmp_path)
    convert_checkpoint(source, tmp_path / "whole", to="espalier")
    kept = len(_staged(out))
    with (work / "finished.jsonl").open("a") as journal:
        journal.write("[" * 100_000 + "\n")
    assert convert_checkpoint(source, out, to="espalier", resume=True).resumed == kept
    assert content(out) == content(tmp_path / "whole")
