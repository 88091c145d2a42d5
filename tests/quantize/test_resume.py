"""Interruptions: whatever stops a quantization, nothing finished is lost, and the result is the same.

Processes are really killed, but the encoder is the one of tests that takes no time. Power loss is not simulated.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Module, codebook_constants, espalier_draft
from quantize_cases import dense_draft, fake_encode_module, fake_sample_errors, moe_draft, write_recipe
from safetensors.numpy import save_file

from espalier_format.checkpoint import open_checkpoint
from espalier_format.encoder.module import SampledErrors
from espalier_format.errors import OutputExistsError, UsageError, WriteError
from espalier_format.operations.quantize import quantize_checkpoint
from espalier_format.operations.verify import verify_checkpoint

SCRIPT = """
    import os, signal, sys, time, traceback
    from pathlib import Path
    import quantize_cases
    import espalier_format.quantize.encode as encode
    import espalier_format.quantize.measure as measure
    from espalier_format.errors import OutputExistsError
    from espalier_format.operations.quantize import quantize_checkpoint

    encode.encode_module = quantize_cases.fake_encode_module
    measure.sample_errors = quantize_cases.fake_sample_errors
    source, folder, first, step = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])

    EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")

    def run(out, stop, **options):
        "Quantize, killed just before the stop-th time that something at the destination is opened or renamed."
        child = os.fork()
        if child == 0:
            count = [0]

            def watch(event, arguments):
                if event in EVENTS and str(out) in str(arguments[0]):
                    count[0] += 1
                    if count[0] == stop:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(watch)
            try:
                quantize_checkpoint(source, out, preset_name="espalier", seed=5, **options)
            except OutputExistsError as error:
                if "another process" in str(error):
                    os._exit(6)  # some kernels release the lock of a killed process a little later
                print(error, *out.rglob("*"), file=sys.stderr, flush=True)
                os._exit(8)
            except BaseException:
                traceback.print_exc()
                os._exit(9)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == 6:
            time.sleep(0.1)
            return run(out, stop, **options)
        return os.waitstatus_to_exitcode(status)

    def content(out):
        return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file() and p.name[0] != "."}

    whole = folder / "whole"
    assert run(whole, 0) == 0
    expected = content(whole)
    stop, outcomes = first, set()
    while True:
        out = folder / f"stop-{stop}"
        status = run(out, stop)
        if status == 0:
            break  # it came to its end before
        assert status == -signal.SIGKILL, status
        if (out / "config.json").exists():
            found = {name: data for name, data in content(out).items() if not name.startswith(".")}
            assert found == expected, stop
            outcomes.add("complete")
        else:
            status = run(out, 0, resume=True)
            assert status == 0, (stop, status)
            outcomes.add("resumed")
            assert content(out) == expected, stop
            assert not (out / ".espalier-in-progress").exists()
        stop += step
    # One output that is killed again and again, each run a little later than the one before.
    out, stop, runs = folder / "again", 12, 0
    while run(out, stop, resume=True, force=True) != 0:
        stop, runs = stop + 9, runs + 1
    assert content(out) == expected
    print(stop, runs, *sorted(outcomes), sep=",")
    """


def _run_script(source: Path, folder: Path, first: int, step: int) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), *map(str, (source, folder, first, step))],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_killed_at_many_moments(tmp_path: Path) -> None:
    source = moe_draft(experts=2).write(tmp_path / "m")
    _, runs, *outcomes = _run_script(source, tmp_path, 1, 23).split(",")
    assert "resumed" in outcomes
    assert int(runs) > 3


@pytest.mark.slow
def test_killed_at_every_moment(tmp_path: Path) -> None:
    source = dense_draft().write(tmp_path / "m")
    _, _, *outcomes = _run_script(source, tmp_path, 1, 1).split(",")
    assert set(outcomes) == {"complete", "resumed"}


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


class _Interrupting:
    """An encoder that is interrupted at the given module."""

    def __init__(self, stop: int, error: BaseException) -> None:
        self.encoded: list[str] = []
        self._stop = stop
        self._error = error

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if len(self.encoded) == self._stop:
            raise self._error
        self.encoded.append(options["name"])
        return fake_encode_module(*arguments, **options)


@pytest.mark.usefixtures("fake_encoder")
def test_only_what_is_missing_is_encoded(moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quantize_checkpoint(moe, tmp_path / "whole", preset_name="espalier")
    encoder = _Interrupting(5, KeyboardInterrupt())
    monkeypatch.setattr("espalier_format.quantize.encode.encode_module", encoder)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(moe, tmp_path / "out", preset_name="espalier")
    assert not (tmp_path / "out" / "config.json").exists()
    again = _Interrupting(1000, KeyboardInterrupt())
    monkeypatch.setattr("espalier_format.quantize.encode.encode_module", again)
    monkeypatch.setattr("espalier_format.quantize.measure.sample_errors", None)  # nothing is measured again
    report = quantize_checkpoint(moe, tmp_path / "out", preset_name="espalier", resume=True)
    assert report.resumed == 5
    assert len(again.encoded) == len(report.modules) - 5
    assert not set(again.encoded) & set(encoder.encoded)
    assert _content(tmp_path / "out") == _content(tmp_path / "whole")
    assert [m.to_json() for m in report.modules] == [m.to_json() for m in whole.modules]


@pytest.mark.usefixtures("fake_encoder")
def test_what_is_measured_is_not_measured_again(moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize_checkpoint(moe, tmp_path / "whole", preset_name="espalier")
    measured: list[str] = []

    def measure(*arguments: Any, name: str, **options: Any) -> SampledErrors:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(name)
        return fake_sample_errors(*arguments)

    monkeypatch.setattr("espalier_format.quantize.measure.sample_errors", measure)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(moe, tmp_path / "out", preset_name="espalier")
    first, measured[:] = set(measured), []
    monkeypatch.setattr(
        "espalier_format.quantize.measure.sample_errors",
        lambda *a, **k: measured.append(k["name"]) or fake_sample_errors(*a),
    )
    quantize_checkpoint(moe, tmp_path / "out", preset_name="espalier", resume=True)
    assert len(first) == 3
    assert not first & set(measured)
    assert len(measured) == len(set(measured)) == 12 - 3
    assert _content(tmp_path / "out") == _content(tmp_path / "whole")


@pytest.mark.usefixtures("fake_encoder")
def test_an_unfinished_output_is_not_taken_over_silently(
    moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier_format.quantize.encode.encode_module", _Interrupting(3, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(moe, tmp_path / "out", preset_name="espalier")
    monkeypatch.setattr("espalier_format.quantize.encode.encode_module", fake_encode_module)
    with pytest.raises(OutputExistsError, match="--resume goes on with it, --force alone begins anew"):
        quantize_checkpoint(moe, tmp_path / "out", preset_name="espalier")
    assert (tmp_path / "out" / ".espalier-in-progress" / "work" / "results").is_dir()
    assert quantize_checkpoint(moe, tmp_path / "out", preset_name="espalier", force=True).resumed == 0


@pytest.mark.usefixtures("fake_encoder")
def test_another_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = moe_draft().write(tmp_path / "m")
    (tmp_path / "s.json").write_text('{"*.0.*": 3}')
    monkeypatch.setattr("espalier_format.quantize.encode.encode_module", _Interrupting(3, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, tmp_path / "out", preset_name="espalier")
    monkeypatch.setattr("espalier_format.quantize.encode.encode_module", fake_encode_module)
    changes: list[tuple[str, dict[str, Any]]] = [
        ("another seed (0, now 1)", {"seed": 1}),
        ("another effort (thorough, now fast)", {"effort": "fast"}),
        ("another bits (none, now 2.5)", {"bits": 2.5}),
        ("another effort (thorough, now exact) and another seed (0, now 7)", {"seed": 7, "effort": "exact"}),
        ("another sensitivity", {"sensitivity": tmp_path / "s.json"}),
        ("another bits (none, now 2.5) and another recipe", {"preset_name": None, "bits": 2.5}),
    ]
    for message, options in changes:
        with pytest.raises(UsageError) as caught:
            quantize_checkpoint(source, tmp_path / "out", resume=True, **{"preset_name": "espalier", **options})
        assert caught.value.code == "usage"
        assert caught.value.message == f"the unfinished output was begun with {message}; --force begins anew"
    shard = source / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(UsageError, match="another source"):
        quantize_checkpoint(source, tmp_path / "out", resume=True, preset_name="espalier")
    data[-1] ^= 1
    # Nothing was lost by trying: the job itself can still go on once the source is what it was.
    state = json.loads((tmp_path / "out" / ".espalier-in-progress" / "work" / "job.json").read_text())
    shard.write_bytes(data)
    os.utime(shard, ns=(state["source"][0][2], state["source"][0][2]))
    assert quantize_checkpoint(source, tmp_path / "out", resume=True, preset_name="espalier").resumed == 3


@pytest.mark.usefixtures("fake_encoder")
def test_a_full_disk_loses_nothing(moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize_checkpoint(moe, tmp_path / "whole", preset_name="espalier")
    calls = [0]
    real = os.fsync

    def full(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] % 7 == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    resumed = []
    for _ in range(100):
        try:
            quantize_checkpoint(moe, tmp_path / "out", preset_name="espalier", resume=True)
            break
        except WriteError as error:
            assert "No space left" in str(error)  # noqa: PT017 - one of many attempts
            results = tmp_path / "out" / ".espalier-in-progress" / "work" / "results"
            resumed.append(len(list(results.glob("*.safetensors"))) if results.exists() else 0)
            assert not list(results.glob("*.partial"))
            calls[0] += 3
    monkeypatch.setattr(os, "fsync", real)
    if not (tmp_path / "out" / "config.json").exists():
        quantize_checkpoint(moe, tmp_path / "out", preset_name="espalier", resume=True)
    assert resumed == sorted(resumed)
    assert _content(tmp_path / "out") == _content(tmp_path / "whole")


@pytest.mark.usefixtures("fake_encoder")
@pytest.mark.parametrize("finished", [0, 1])
@pytest.mark.parametrize("what", ["results", "measurements.jsonl"])
def test_the_message_of_a_full_disk_says_what_is_kept(
    what: str, finished: int, moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measurements that are not on disk are lost, though the run that made them has them in memory."""
    real, seen = os.fsync, list[int]()

    def full(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink()
        if name.is_file() and what in name.parts:
            seen.append(descriptor)
            if len(seen) > finished:
                raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr("espalier_format.quantize.state._SECONDS_PER_SYNC", 0.0)
    given: dict[str, Any] = {"preset_name": "espalier"}
    if what == "results":  # without any measurements, which would be kept
        given = {"recipe": write_recipe(tmp_path, 'match = "*"\ncodebook = "e2m1@2"')}
    with pytest.raises(WriteError, match="No space left on device; ") as caught:
        quantize_checkpoint(moe, tmp_path / "out", **given)
    assert ("what is finished is kept, and --resume" in str(caught.value)) is bool(finished)
    assert ("what was written has been removed" in str(caught.value)) is not bool(finished)
    assert (tmp_path / "out").exists() is bool(finished)


@pytest.mark.usefixtures("fake_encoder")
def test_a_spoilt_result_is_made_again(moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize_checkpoint(moe, tmp_path / "whole", preset_name="espalier")
    monkeypatch.setattr("espalier_format.quantize.encode.encode_module", _Interrupting(6, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(moe, tmp_path / "out", preset_name="espalier")
    state = tmp_path / "out" / ".espalier-in-progress" / "work"
    results = sorted((state / "results").iterdir())
    data = bytearray(results[0].read_bytes())
    data[-1] ^= 1
    results[0].write_bytes(data)
    results[1].write_bytes(results[1].read_bytes()[:-100])
    results[2].write_bytes(b"")
    noted = results[3].read_bytes()
    results[3].write_bytes(noted.replace(b'"digest":"', b'"digest":"0', 1).replace(b"0", b"", 1))
    assert results[3].read_bytes() != noted
    (state / "results" / "000099.partial").write_bytes(b"half")
    lines = (state / "measurements.jsonl").read_bytes()
    first, second, third, *rest = lines.splitlines(keepends=True)
    name = first.partition(b",")[0]
    damaged = [name + b", []]\n", second.replace(b", [", b", [1.0, ", 1), third[:-3] + b", NaN]]\n", *rest]
    (state / "measurements.jsonl").write_bytes(b"".join(damaged)[:-20])
    monkeypatch.setattr("espalier_format.quantize.encode.encode_module", fake_encode_module)
    report = quantize_checkpoint(moe, tmp_path / "out", preset_name="espalier", resume=True)
    assert report.resumed == 2
    assert _content(tmp_path / "out") == _content(tmp_path / "whole")


@pytest.mark.usefixtures("fake_encoder")
def test_resume_without_anything_to_resume_begins(dense: Path, tmp_path: Path) -> None:
    assert quantize_checkpoint(dense, tmp_path / "out", bits=2, resume=True).resumed == 0
    assert verify_checkpoint(tmp_path / "out", deep=True).exit_code == 0


@pytest.mark.usefixtures("fake_encoder")
def test_an_old_output_stays_until_the_new_one_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = dense_draft().write(tmp_path / "m")
    quantize_checkpoint(source, tmp_path / "out", bits=2)
    before = _content(tmp_path / "out")
    monkeypatch.setattr("espalier_format.quantize.encode.encode_module", _Interrupting(3, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, tmp_path / "out", bits=4, force=True)
    assert _content(tmp_path / "out") == before
    assert verify_checkpoint(tmp_path / "out", deep=True).exit_code == 0
    monkeypatch.setattr("espalier_format.quantize.encode.encode_module", fake_encode_module)
    assert quantize_checkpoint(source, tmp_path / "out", bits=4, force=True, resume=True).resumed == 3
    assert verify_checkpoint(tmp_path / "out", deep=True).exit_code == 0
    assert _content(tmp_path / "out") != before


@pytest.fixture
def unfinished(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_encoder: None) -> Path:
    """The workspace of an unfinished output of ``dense``."""
    monkeypatch.setattr("espalier_format.quantize.encode.encode_module", _Interrupting(3, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(dense, tmp_path / "out", bits=2.5)
    monkeypatch.setattr("espalier_format.quantize.encode.encode_module", fake_encode_module)
    return tmp_path / "out" / ".espalier-in-progress" / "work"


@pytest.mark.parametrize("job", [True, False])
@pytest.mark.parametrize("name", ["", "results", "job.json", "measurements.jsonl"])
@pytest.mark.parametrize("dangling", [True, False])
def test_nothing_is_changed_through_a_link(
    name: str, job: bool, dangling: bool, unfinished: Path, dense: Path, tmp_path: Path
) -> None:
    if not job:
        (unfinished / "job.json").unlink()
    elsewhere = tmp_path / "elsewhere"
    place = unfinished / name
    if place.exists():
        place.rename(elsewhere)
    if dangling:
        elsewhere = tmp_path / "nowhere"
    elif not elsewhere.exists():
        elsewhere.write_text("theirs")
    elif elsewhere.is_dir():
        (elsewhere / "data").write_text("theirs")
    place.symlink_to(elsewhere)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(OutputExistsError, match="is a link, and not ours; move it away"):
        quantize_checkpoint(dense, tmp_path / "out", bits=2.5, resume=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert place.is_symlink()
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", ["000000.safetensors", "000000.partial"])
def test_a_folder_among_the_results_is_refused(name: str, unfinished: Path, dense: Path, tmp_path: Path) -> None:
    place = unfinished / "results" / name
    place.unlink(missing_ok=True)
    place.mkdir()
    (place / "data").write_text("theirs")
    with pytest.raises(OutputExistsError, match=f"{name}: is a folder, and not ours; move it away$"):
        quantize_checkpoint(dense, tmp_path / "out", bits=2.5, resume=True)
    assert (place / "data").read_text() == "theirs"
    place.rename(tmp_path / "away")
    assert quantize_checkpoint(dense, tmp_path / "out", bits=2.5, resume=True).resumed >= 2


def test_a_result_behind_a_link_is_made_again(unfinished: Path, dense: Path, tmp_path: Path) -> None:
    results = sorted((unfinished / "results").iterdir())
    results[0].rename(tmp_path / "elsewhere")
    results[0].symlink_to(tmp_path / "elsewhere")
    data = (tmp_path / "elsewhere").read_bytes()
    assert quantize_checkpoint(dense, tmp_path / "out", bits=2.5, resume=True).resumed == len(results) - 1
    assert (tmp_path / "elsewhere").read_bytes() == data


@pytest.mark.parametrize("line", ["[" * 100_000, '["m", [1' + "0" * 400 + "]]"])
def test_state_of_another_form_is_not_taken_over(line: str, unfinished: Path, dense: Path, tmp_path: Path) -> None:
    with (unfinished / "measurements.jsonl").open("a") as file:
        file.write(line + "\n")
    job = (unfinished / "job.json").read_bytes()
    (unfinished / "job.json").write_text("[" * 100_000)
    with pytest.raises(UsageError, match=r"job.json is damaged\); --force begins anew"):
        quantize_checkpoint(dense, tmp_path / "out", bits=2.5, resume=True)
    (unfinished / "job.json").write_bytes(job)
    assert quantize_checkpoint(dense, tmp_path / "out", bits=2.5, resume=True).resumed == 3


@pytest.mark.parametrize("report", ["[" * 20_000, "[]", None])
def test_a_result_with_a_report_of_another_form_is_made_again(
    report: str | None, unfinished: Path, dense: Path, tmp_path: Path
) -> None:
    path = unfinished / "results" / "000000.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"]["report"] = report
    if report is None:
        del header["__metadata__"]["report"]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    assert quantize_checkpoint(dense, tmp_path / "out", bits=2.5, resume=True).resumed == 2


@pytest.mark.usefixtures("fake_encoder")
def test_other_codebooks_of_the_source_are_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an Espalier source config.json alone says how the trellis is decoded; the shards stay what they are."""
    names = [f"model.layers.{number}.mlp.up_proj" for number in range(3)]
    draft = espalier_draft([Module(name, 64, 64, "exl3-mcg@2", (0, 0)) for name in names], ())
    source = draft.write(tmp_path / "m")
    recipe = write_recipe(tmp_path, 'match = "*.up_proj"\ncodebook = "e2m1@1"')
    monkeypatch.setattr("espalier_format.quantize.encode.encode_module", _Interrupting(2, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, tmp_path / "out", recipe=recipe)
    monkeypatch.setattr("espalier_format.quantize.encode.encode_module", fake_encode_module)
    before = (source / "config.json").read_text()
    other = json.loads(before.replace("exl3-mcg@2", "exl3-mul1@2"))
    other["quantization_config"]["codebooks"] = {"exl3-mul1@2": codebook_constants("exl3-mul1@2")}
    (source / "config.json").write_text(json.dumps(other))
    with open_checkpoint(source) as checkpoint:
        assert checkpoint.modules[names[0]].codebook.name == "exl3-mul1@2"
    with pytest.raises(UsageError, match="another quantization_config"):
        quantize_checkpoint(source, tmp_path / "out", recipe=recipe, resume=True)
    unrelated = json.loads(before)
    unrelated["quantization_config"]["producer"] = {"name": "somebody", "version": "2"}
    (source / "config.json").write_text(json.dumps(unrelated))
    assert quantize_checkpoint(source, tmp_path / "out", recipe=recipe, resume=True).resumed == 2


@pytest.mark.usefixtures("fake_encoder")
def test_other_hessians_are_another_job(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are used, whatever else lies there."""
    folder = tmp_path / "hessians"
    folder.mkdir()
    used = folder / "model.layers.0.mlp.up_proj.safetensors"
    save_file({"hessian": np.eye(64, dtype=np.float32), "count": np.array(1)}, used)
    (folder / "gone").symlink_to("nowhere")
    monkeypatch.setattr("espalier_format.quantize.encode.encode_module", _Interrupting(2, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(dense, tmp_path / "out", bits=2, hessians=folder)
    monkeypatch.setattr("espalier_format.quantize.encode.encode_module", fake_encode_module)
    (folder / "notes.txt").write_text("unrelated")
    stamp = used.stat().st_mtime_ns
    os.utime(used, ns=(stamp, stamp + 1))
    with pytest.raises(UsageError, match="another set of Hessians"):
        quantize_checkpoint(dense, tmp_path / "out", bits=2, hessians=folder, resume=True)
    os.utime(used, ns=(stamp, stamp))
    assert quantize_checkpoint(dense, tmp_path / "out", bits=2, hessians=folder, resume=True).resumed == 2
