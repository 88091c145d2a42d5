"""Run the command, in this process or in another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from quantize_cases import fake_encode_module, fake_sample_errors

from espalier_format.cli import main
from espalier_format.operations.convert import convert_checkpoint


@pytest.fixture
def fake_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the encoder, which needs no back end then: those are packages that the tests here do without."""
    monkeypatch.setattr("espalier_format.quantize.encode.encode_module", fake_encode_module)
    monkeypatch.setattr("espalier_format.quantize.measure.sample_errors", fake_sample_errors)
    monkeypatch.setattr("espalier_format.quantize.prepare.load_backend", lambda name, codebook: None)


@dataclass(frozen=True)
class Outcome:
    """What a run printed and returned."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """stdout as one JSON document."""
        document: dict[str, Any] = json.loads(self.out)
        return document


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run the command in this process."""

    def run_here(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run_here


@pytest.fixture
def run_process() -> Callable[..., Outcome]:
    """Run the command in a process of its own, its output going to pipes."""

    def run_there(*arguments: object, **environment: str) -> Outcome:
        result = subprocess.run(
            [sys.executable, "-m", "espalier_format", *map(str, arguments)],
            env={**os.environ, **environment},
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return Outcome(result.returncode, result.stdout, result.stderr)

    return run_there


@pytest.fixture(scope="session")
def llama_espalier(llama_exl3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Convert the shipped checkpoint to Espalier, with digests. Not to be changed."""
    destination = tmp_path_factory.mktemp("cli") / "llama"
    convert_checkpoint(llama_exl3, destination, to="espalier", digests=True)
    return destination


@pytest.fixture(scope="session")
def qmoe_espalier(qmoe_exl3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Convert the fixture with experts to Espalier. Not to be changed."""
    destination = tmp_path_factory.mktemp("cli") / "qmoe"
    convert_checkpoint(qmoe_exl3, destination, to="espalier")
    return destination
