"""Paths of the committed fixtures (tests/fixtures/README.md says where they come from)."""

from __future__ import annotations

from pathlib import Path

import pytest

import espalier_format

pytest_plugins = ["capabilities"]


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The folder of committed fixtures."""
    return Path(__file__).parent / "fixtures"


@pytest.fixture(scope="session")
def llama_exl3() -> Path:
    """A complete EXL3 checkpoint that exllamav3 wrote: Llama, 3.0 bits, MCG, 6-bit head."""
    return Path(espalier_format.__file__).parent / "demo_data" / "llama-3.0-mcg"


@pytest.fixture(scope="session")
def qmoe_exl3(fixtures: Path) -> Path:
    """A complete EXL3 checkpoint that exllamav3 wrote: Qwen3.5-MoE, 2.5 bits, MUL1, vision and MTP."""
    return fixtures / "exl3" / "qmoe-2.5-mul1"
