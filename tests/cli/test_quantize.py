"""The command ``quantize``: options, output, exit codes. The encoder is the one of tests, that takes no time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from quantize_cases import dense_draft, fake_encode_module, moe_draft

from espalier_format.cli.progress import ProgressBar


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    return moe_draft().write(tmp_path / "source")


@pytest.mark.usefixtures("fake_encoder")
def test_it_says_what_it_did(run: Callable[..., object], moe: Path, tmp_path: Path) -> None:
    outcome = run("quantize", moe, tmp_path / "out", "--preset", "espalier", "--seed", 3)
    assert outcome.code == 0
    assert outcome.err == ""
    lines = [line.split() for line in outcome.out.splitlines()]
    assert lines[0] == [str(tmp_path / "out")]
    text = "\n".join(" ".join(line) for line in lines)
    assert "quantized plain safetensors to Espalier, 21 modules, 4 kept" in text
    assert "bits 2.500 per weight, head" in text
    assert "e2m1@1 " in text
    assert "int8@6 1 module" in text
    assert f"next espalier-format verify {tmp_path / 'out'} --deep" in text
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["source"]["seed"] == 3
    assert run("verify", tmp_path / "out", "--deep").code == 0
    assert run("inspect", tmp_path / "out").code == 0


@pytest.mark.usefixtures("fake_encoder")
def test_json_and_report_are_the_same_document(run: Callable[..., object], moe: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    outcome = run("quantize", moe, tmp_path / "out", "--bits", 3, "--report", report, "--json")
    assert outcome.code == 0
    document = outcome.document
    assert document["source_format"] == run("inspect", moe, "--json").document["format"] == "plain"
    assert document.pop("schema_version") == 1
    assert document == json.loads(report.read_text())
    assert list(document) == [
        "source", "destination", "source_format", "target_format", "recipe", "requested_bits", "bits", "head_bits",
        "seed", "effort", "relative_mse", "kept", "resumed", "seconds", "bytes_read", "bytes_written", "files",
        "warnings", "modules",
    ]  # fmt: skip
    assert list(document["modules"][0]) == [
        "name", "codebook", "in_features", "out_features", "rotation", "relative_mse", "relative_proxy_loss",
        "damping", "sum_of_squares", "measured", "sensitivity", "warnings",
    ]  # fmt: skip


@pytest.mark.usefixtures("fake_encoder")
def test_the_options_reach_the_operation(run: Callable[..., object], tmp_path: Path) -> None:
    source = dense_draft(hidden=128).write(tmp_path / "m")
    (tmp_path / "r.toml").write_text('[[rule]]\nmatch = "*_proj"\ncodebook = ["exl3-mul1@2", "exl3-mul1@4"]\n')
    (tmp_path / "s.toml").write_text('"*.o_proj" = 1e12\n')
    (tmp_path / "h").mkdir()
    outcome = run(
        "quantize", source, tmp_path / "out", "--to", "exl3", "--recipe", tmp_path / "r.toml", "--bits", "6.4",
        "--sensitivity", tmp_path / "s.toml", "--hessians", tmp_path / "h", "--threads", 1, "--no-digests", "--json",
    )  # fmt: skip
    assert outcome.code == 2
    assert outcome.document["error"]["code"] == "usage"
    outcome = run(
        "quantize", source, tmp_path / "out", "--to", "exl3", "--recipe", tmp_path / "r.toml", "--bits", "5.0526",
        "--sensitivity", tmp_path / "s.toml", "--hessians", tmp_path / "h", "--threads", 1, "--backend", "numpy",
        "--effort", "fast", "--no-digests", "--json",
    )  # fmt: skip
    assert outcome.code == 0, outcome.out
    widths = {m["name"].rpartition(".")[2]: m["codebook"] for m in outcome.document["modules"]}
    assert widths["o_proj"] == "exl3-mul1@4"
    assert outcome.document["target_format"] == "exl3"
    assert outcome.document["effort"] == "fast"
    assert any("no Hessian" in line for line in outcome.document["warnings"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error[usage]: give --bits, --preset or --recipe"),
        (["--preset", "mine"], "error[usage]:"),
        (["--bits", "0.5"], "error[usage]: 0.5 bits per weight cannot be met for the decoder: its candidates reach"),
        (["--bits", "2", "--threads", "0"], "error[usage]:"),
        (["--bits", "2", "--backend", "abacus"], "error[usage]:"),
        (["--bits", "2", "--effort", "some"], "error[usage]:"),
        (["--bits", "2", "--hessians", "nowhere"], "error[missing-file]: nowhere: there is no such folder"),
        (["--recipe", "nowhere.toml"], "error[missing-file]: nowhere.toml: does not exist"),
    ],
)
def test_errors_are_one_line(
    run: Callable[..., object], arguments: list[str], message: str, moe: Path, tmp_path: Path
) -> None:
    outcome = run("quantize", moe, tmp_path / "out", *arguments)
    assert outcome.code == 2
    assert outcome.err.startswith(message)
    assert outcome.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("fake_encoder")
def test_paths_are_what_convert_takes(
    run: Callable[..., object], moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty one is not the current folder, and a repository is one to download."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    commands = {"to quantize it": ("quantize", "--bits", 2), "to convert it": ("convert", "--to", "exl3")}
    for purpose, command in commands.items():
        outcome = run(command[0], moe, "", *command[1:])
        assert outcome.err == 'error[usage]: the path of the output is empty; the current folder is "."\n'
        outcome = run(command[0], "", "out", *command[1:])
        assert outcome.err == 'error[usage]: the path of the source is empty; the current folder is "."\n'
        for address in ("org/name", "hf://org/name", "org/name@v1"):
            outcome = run(command[0], address, "out", *command[1:])
            assert outcome.code == 2
            download = "hf download org/name --local-dir name"
            assert outcome.err == f"error[usage]: org/name is not on this machine; {purpose}, download it: {download}\n"
    for option, what in (
        ("--recipe", "the recipe"),
        ("--hessians", "the folder of Hessians"),
        ("--sensitivity", "the sensitivity file"),
        ("--report", "the report"),
    ):
        outcome = run("quantize", moe, "out", *(() if option == "--recipe" else ("--bits", 2)), option, "")
        assert outcome.err == f'error[usage]: the path of {what} is empty; the current folder is "."\n'
    assert not list(folder.iterdir())


@pytest.mark.usefixtures("fake_encoder")
def test_an_interrupted_run_is_resumed(
    run: Callable[..., object], moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = [0]

    def interrupted(*arguments: object, **options: object) -> object:
        count[0] += 1
        if count[0] == 4:
            raise KeyboardInterrupt
        return fake_encode_module(*arguments, **options)

    monkeypatch.setattr("espalier_format.quantize.encode.encode_module", interrupted)
    command = ("quantize", moe, tmp_path / "out", "--preset", "espalier")
    assert run(*command).code == 130
    outcome = run(*command)
    assert outcome.code == 2
    assert "--resume goes on with it" in outcome.err
    assert run("convert", moe, tmp_path / "out", "--to", "espalier").code == 2
    outcome = run(*command, "--resume")
    assert outcome.code == 0
    assert "21 modules, 3 of them before this run" in outcome.out


@pytest.mark.usefixtures("fake_encoder")
def test_progress_adds_up(moe: Path, tmp_path: Path) -> None:
    from espalier_format.operations.quantize import quantize_checkpoint

    class Recorder:
        def __init__(self) -> None:
            self.jobs: list[list[object]] = []

        def start(self, total_bytes: int, label: str) -> None:
            self.jobs.append([label, total_bytes, 0, False])

        def advance(self, n_bytes: int) -> None:
            self.jobs[-1][2] += n_bytes  # type: ignore[operator]

        def finish(self) -> None:
            self.jobs[-1][3] = True

    recorder = Recorder()
    quantize_checkpoint(moe, tmp_path / "out", preset_name="espalier", progress=recorder)
    assert [job[0] for job in recorder.jobs] == ["measuring", "encoding", "writing"]
    for label, total, done, finished in recorder.jobs:
        assert (done, finished) == (total, True), label
    assert hasattr(ProgressBar, "advance")


def test_the_command_loads_no_encoder_before_it_runs(run_process: Callable[..., object]) -> None:
    outcome = run_process("quantize", "--help", PYTHONPROFILEIMPORTTIME="1")
    assert outcome.code == 0
    for module in ("numpy", "numba", "torch"):
        assert f" {module}\n" not in outcome.err
    assert "--sensitivity" in outcome.out
    assert os.environ.get("PYTHONPROFILEIMPORTTIME") is None
