"""Files made by hand, byte by byte, so that nothing here depends on the code under test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

MakeShard = Callable[..., Path]


@pytest.fixture
def make_shard(tmp_path: Path) -> MakeShard:
    """Write a safetensors file from a header (an object, or its bytes) and data; `length` may lie."""

    def make(header: object, data: bytes = b"", *, length: int | None = None, name: str = "model.safetensors") -> Path:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path = tmp_path / name
        path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
        return path

    return make
