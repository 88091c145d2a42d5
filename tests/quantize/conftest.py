"""Small plain checkpoints, and an encoder that takes no time."""

from __future__ import annotations

from pathlib import Path

import pytest
from quantize_cases import dense_draft, fake_encode_module, fake_sample_errors, moe_draft


@pytest.fixture
def fake_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the encoder: for tests of everything around it."""
    monkeypatch.setattr("espalier_format.quantize.encode.encode_module", fake_encode_module)
    monkeypatch.setattr("espalier_format.quantize.measure.sample_errors", fake_sample_errors)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return dense_draft().write(tmp_path / "source")


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    return moe_draft().write(tmp_path / "source")
