"""Random damage: whatever happens to a checkpoint's files, it is refused by an error of the library or read.

Not checked: that damage is always found. A changed byte of a trellis, a scale or a plain tensor gives
another valid checkpoint; only the manifest knows.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import Exl3Module, Module, Tensor, espalier_draft, exl3_draft
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier_format.checkpoint import open_checkpoint
from espalier_format.errors import EspalierError
from espalier_format.schema import parse_quantization_config

MODULES = (Module("a.q_proj", 32, 16, "e2m1@1", (32, 0), bias="F16"),)
PLAIN = {"norm.weight": Tensor("F32", (4,), bytes(16))}


@pytest.fixture(scope="module")
def sources() -> Iterator[dict[str, Path]]:
    root = Path(tempfile.mkdtemp())
    yield {
        "espalier": espalier_draft(MODULES, plain=PLAIN, num_shards=2, source={"format": "exl3"}).write(root / "e"),
        "exl3": exl3_draft([Exl3Module("a.q_proj", 128, 128, 1, bias="F16")], PLAIN, num_shards=2).write(root / "x"),
    }
    shutil.rmtree(root)


def check_line(error: EspalierError) -> None:
    assert error.code
    assert str(error).isprintable()


@st.composite
def damage(draw: st.DrawFn, data: bytes) -> bytes:
    """Flip, cut, insert, or move a piece; most of it within the first 1,500 bytes, where the headers are."""
    spot = st.integers(0, min(len(data), 1500) - 1)
    kind = draw(st.sampled_from(["flip", "cut", "insert", "move", "set"]))
    at, to = draw(spot), draw(spot)
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
    if kind == "set":
        return data[:at] + bytes([draw(st.integers(0, 255))]) + data[at + 1 :]
    if kind == "cut":
        return data[: min(at, to)] + data[max(at, to) :] if draw(st.booleans()) else data[:at]
    if kind == "insert":
        return data[:at] + draw(st.binary(min_size=1, max_size=8)) + data[at:]
    piece = data[at : at + draw(st.integers(1, 200))]
    return data[:to] + piece + data[to + (len(piece) if draw(st.booleans()) else 0) :]


@pytest.mark.parametrize("format_", ["espalier", "exl3"])
@settings(max_examples=100, deadline=None)
@given(draws=st.data())
def test_damaged_files(sources: dict[str, Path], format_: str, draws: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "checkpoint"
        shutil.copytree(sources[format_], folder)
        path = draws.draw(st.sampled_from(sorted(folder.iterdir())))
        path.write_bytes(draws.draw(damage(path.read_bytes())))
        try:
            checkpoint = open_checkpoint(folder)
        except EspalierError as error:
            check_line(error)
            return
        with checkpoint:
            for name, module in checkpoint.modules.items():
                assert module.trellis.shape[0] * 16 == module.padded_in
                assert module.trellis.shape[1] * 16 == module.padded_out
                assert checkpoint.codes(name).shape == (module.padded_in, module.padded_out)
            for name in checkpoint.tensors:
                checkpoint.tensor(name)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=5) | st.just(2**70),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=5,
)


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) in a document."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield node, key
        yield from places(value)


@settings(max_examples=300, deadline=None)
@given(draws=st.data())
def test_changed_configs(draws: st.DataObject) -> None:
    """What is accepted comes back from the object exactly as it was; the rest is refused in one line."""
    block = copy.deepcopy(espalier_draft(source={"format": "exl3", "seed": 1, "packed_signs": ["a.su"]}).block)
    for _ in range(draws.draw(st.integers(1, 2))):
        container, key = draws.draw(st.sampled_from(list(places(block))))
        change = draws.draw(st.sampled_from(["replace", "remove", "rename", "swap"]))
        if change == "replace":
            container[key] = draws.draw(JSON)
        elif change == "remove":
            del container[key]
        elif change == "rename" and isinstance(container, dict):
            container[draws.draw(st.text(max_size=6))] = container.pop(key)
        else:
            other, other_key = draws.draw(st.sampled_from(list(places(block))))
            container[key] = copy.deepcopy(other[other_key])
        if not block:
            break
    before = copy.deepcopy(block)
    try:
        config = parse_quantization_config(block)
    except EspalierError as error:
        check_line(error)
        return
    finally:
        assert json.dumps(block) == json.dumps(before)
    written = config.to_json()
    stated = {key: value for key, value in before.items() if key != "source"}
    assert {key: value for key, value in written.items() if key != "source"} == stated
    assert parse_quantization_config(written) == config
