"""Makes the independent decoder of tests/spec importable, and writes the kit once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from espalier_format.conformance import write_kit

sys.path.insert(0, str(Path(__file__).parents[1] / "spec"))


@pytest.fixture(scope="session")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a written kit."""
    return write_kit(tmp_path_factory.mktemp("conformance") / "kit").folder
