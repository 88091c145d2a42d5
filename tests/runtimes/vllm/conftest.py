"""These tests need vLLM's CPU build and an environment of its own: `make test-vllm`."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session", autouse=True)
def _vllm() -> None:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; `make test-vllm` makes an environment that has it")
