"""``conformance``: what it prints, its exit codes, its JSON; what it compares is in tests/conformance."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ADAPTER = "espalier_format.conformance.adapters.numpy_adapter"
Run = Callable[..., Any]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a module of decoders."""
    (tmp_path / "kit_decoders.py").write_text(
        "import os, signal\nfrom espalier_format.conformance.adapters import numpy_adapter\n"
        "def wrong(*arguments):\n    return numpy_adapter.codes(*arguments) + 1\n"
        "def crash(*arguments):\n    raise ValueError('bad\\x1b[31m')\n"
        "def leave(*arguments):\n    os._exit(0)\n"
        "def die(*arguments):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def interrupted(*arguments):\n    raise KeyboardInterrupt\n"
        "def talkative(*arguments):\n    print('decoding')\n    return numpy_adapter.codes(*arguments)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "kit_decoders", raising=False)
    return tmp_path


def test_a_right_decoder(run: Run) -> None:
    outcome = run("conformance", "--decoder", f"{ADAPTER}:codes", "--kind", "codes")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines() == [
        "level 1  opens and refuses  not tested",
        "level 2  decodes            ok",
        f"           codes                        41 passed  {ADAPTER}:codes",
        "level 3  multiplies         not tested",
        "41 cases, nothing wrong",
    ]


def test_a_wrong_decoder(run: Run, own: Path) -> None:
    outcome = run(
        "conformance", "--decoder", "codes=kit_decoders:wrong", "--only", "codes/int6@*", "--only", "codes/e2m1@*"
    )
    assert outcome.code == 1
    assert outcome.out.splitlines()[-1] == "5 failures in 5 cases, 36 left out"
    lines = outcome.err.splitlines()
    assert lines
    assert all(line.startswith("failed codes/") for line in lines)
    assert "code[0, 0] is " in lines[0]


def test_text_of_a_decoder_cannot_act_on_a_terminal(run: Run, own: Path) -> None:
    outcome = run("conformance", "--decoder", "kit_decoders:crash", "--kind", "codes", "--only", "codes/int6@4")
    assert outcome.code == 1
    assert outcome.err == "failed codes/int6@4: raised ValueError: bad\\x1b[31m\n"


def test_what_a_decoder_prints_does_not_spoil_the_document(run_process: Run, own: Path) -> None:
    few = ("--kind", "codes", "--only", "codes/int6@4")
    outcome = run_process("conformance", "--decoder", "kit_decoders:talkative", *few, "--json")
    assert outcome.code == 0
    assert outcome.document["cases"] == 1
    assert outcome.err == "decoding\n"


@pytest.mark.parametrize(("decoder", "how"), [("leave", "exit status 0"), ("die", "signal 9")])
def test_a_decoder_that_ends_its_process_shows_nothing(run: Run, own: Path, decoder: str, how: str) -> None:
    few = ("--kind", "codes", "--only", "codes/int6@4")
    outcome = run("conformance", "--decoder", f"kit_decoders:{decoder}", *few, "--report", own / "report.json")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == f"error[usage]: a decoder ended its process before the kit was through (got {how})\n"
    assert not (own / "report.json").exists()


def test_an_import_that_ends_its_process_shows_nothing(run: Run, own: Path) -> None:
    (own / "leaving_decoder.py").write_text("import os\nos._exit(0)\n")
    assert run("conformance", "--decoder", "leaving_decoder:f", "--kind", "codes").code == 2


def test_an_interrupt_of_a_decoder_is_one_of_the_command(run: Run, own: Path) -> None:
    outcome = run("conformance", "--decoder", "kit_decoders:interrupted", "--kind", "codes")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "interrupted\n")


def test_errors_of_the_other_process_are_those_of_this_one(run: Run, own: Path) -> None:
    (own / "needy_decoder.py").write_text(
        "from espalier_format.errors import DependencyError\n"
        "class Own(DependencyError):\n    pass\n"
        "raise Own('needs x', path='a/b', expected=['x', 1], got=object)\n"
    )
    outcome = run("conformance", "--decoder", "needy_decoder:f", "--kind", "codes", "--debug")
    assert outcome.code == 2
    last = outcome.err.splitlines()[-1]
    assert last == "error[missing-dependency]: a/b: needs x (expected ['x', 1], got <class 'object'>)"
    assert "needy_decoder.py" in outcome.err  # the traceback of the other process


def test_many_failures_are_cut_short(run: Run, own: Path) -> None:
    outcome = run("conformance", "--decoder", "kit_decoders:crash", "--kind", "matmul", "--dtype", "float32")
    lines = outcome.err.splitlines()
    assert len(lines) == 51
    assert lines[-1] == "and 46 more; --json lists all"


def test_json_and_a_report(run: Run, own: Path) -> None:
    outcome = run(
        "conformance", "--decoder", "kit_decoders:wrong", "--kind", "codes", "--only", "codes/int6@4", "--json",
        "--report", own / "report.json",
    )  # fmt: skip
    assert outcome.code == 1
    document = outcome.document
    assert json.loads((own / "report.json").read_text("utf-8")) == document
    assert document["levels"] == {"1": "not tested", "2": "failed", "3": "not tested"}
    assert document["decoders"] == [
        {"kind": "codes", "level": 2, "decoder": "kit_decoders:wrong", "passed": 0, "failed": 1,
         "refuses_at_load": False},
    ]  # fmt: skip
    assert (document["schema_version"], document["cases"], document["skipped"]) == (1, 1, 40)
    (failure,) = document["failures"]
    assert (failure["case"], failure["position"]) == ("codes/int6@4", [0, 0])


def test_a_claim(run: Run) -> None:
    few = ("--only", "codes/e2m1*", "--only", "open/valid/*")
    outcome = run("conformance", "--decoder", f"codes={ADAPTER}:codes", "--level", "2", *few)
    assert outcome.code == 1
    assert outcome.out.splitlines()[-1] == "level 2 is not shown; 3 cases, 38 left out, nothing wrong"
    decoders = ("--decoder", f"codes={ADAPTER}:codes", "--decoder", f"open={ADAPTER}:open")
    outcome = run("conformance", *decoders, "--level", "2", *few)
    assert outcome.code == 0
    assert outcome.out.splitlines()[-1] == "7 cases, 160 left out, nothing wrong: level 2 shown"


def test_options_of_the_cases(run: Run) -> None:
    weights = ("conformance", "--decoder", ADAPTER, "--kind", "weights", "--json")
    outcome = run(*weights, "--dtype", "float16", "--dtype", "bfloat16", "--skip", "weights/e*", "--exact")
    assert outcome.code == 0
    assert outcome.document["cases"] == 2 * 5 * 6  # int5, int6 and int8, at two widths each
    # The short names, and a format that is named twice, are the same cases.
    again = run(*weights, "--dtype", "fp16", "--dtype", "bf16", "--dtype", "float16", "--skip", "weights/e*")
    assert again.document["cases"] == outcome.document["cases"]
    assert "no such output dtype" in run(*weights, "--dtype", "float8").document["error"]["message"]
    folders = ("conformance", "--decoder", ADAPTER, "--kind", "open", "--json")
    assert [run(*folders, *more).document["cases"] for more in ((), ("--exl3",))] == [126, 146]


def test_torch_tensors(run: Run) -> None:
    pytest.importorskip("torch")
    adapter = "espalier_format.conformance.adapters.torch_adapter"
    outcome = run("conformance", "--decoder", adapter, "--device", "cpu", "--kind", "codes", "--only", "codes/int*")
    assert outcome.code == 0
    assert run("conformance", "--decoder", adapter, "--device", "nonsense", "--kind", "codes").code == 2


def test_a_decoder_that_refuses_at_load(run: Run) -> None:
    """The report says so, and shows nothing without the callable that does refuse."""
    pytest.importorskip("torch")
    adapter = "espalier_format.conformance.adapters.operators_adapter"
    few = ("--device", "cpu", "--only", "*/edge/scale-nan/*", "--only", "load/refused/*", "--only", "*/*.e_proj/*")
    outcome = run("conformance", "--decoder", adapter, "--kind", "weights", *few)
    assert f"{adapter}:weights, refuses at load" in " ".join(outcome.out.split())
    assert "not tested" in outcome.out.partition("weights")[0].splitlines()[-2]
    both = run("conformance", "--decoder", f"weights={adapter}:weights", "--decoder", f"load={adapter}:load", *few)
    assert both.code == 0
    assert "level 2 decodes ok" in " ".join(both.out.split())


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((), "give a decoder"),
        (("--decoder", f"{ADAPTER}:codes"), "say of which kind"),
        (("--decoder", f"{ADAPTER}:nothing", "--kind", "codes"), "cannot find"),
        (("--decoder", "absent_module:f", "--kind", "codes"), "cannot import absent_module"),
        (("--decoder", ADAPTER, "--level", "4"), "--level"),
        (("--decoder", ADAPTER, "--kind", "decode"), "--kind"),
        (("--decoder", ADAPTER, "--only", "nothing"), "no case has such a name"),
        (("--decoder", ADAPTER, "--write", "x"), "tries nothing"),
        (("--write", "x", "--dtype", "bogus"), "no such output dtype"),
    ],
)
def test_bad_usage(run: Run, arguments: tuple[str, ...], part: str) -> None:
    outcome = run("conformance", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error[usage]: ")
    assert part in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_a_report_that_cannot_be_written(run: Run, tmp_path: Path) -> None:
    few = ("--decoder", f"codes={ADAPTER}:codes", "--only", "codes/int6@4")
    outcome = run("conformance", *few, "--report", tmp_path / "absent" / "report.json")
    assert outcome.code == 2
    assert outcome.err.startswith("error[write-failed]: ")


def test_writing_the_kit(run: Run, tmp_path: Path) -> None:
    outcome = run("conformance", "--write", tmp_path / "kit", "--json")
    assert outcome.code == 0
    files = [path for path in (tmp_path / "kit").rglob("*") if path.is_file()]
    assert outcome.document["files"] == len(files)
    assert outcome.document["bytes"] == sum(path.stat().st_size for path in files)
    again = run("conformance", "--write", f"{tmp_path}/absent/../kit")
    assert again.code == 2
    assert again.err.startswith("error[output-exists]: ")
    again = run("conformance", "--write", tmp_path / "kit")
    assert again.code == 2
    assert again.err.startswith("error[output-exists]: ")
