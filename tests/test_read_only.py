"""What an object of the library holds cannot be changed through it, and is a dict for everything that only reads."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic
import pytest
from builders import espalier_draft

import espalier_format as ef
from espalier_format.read_only import ReadOnlyDict

PARSED = {"config", "quantization_config", "replaced_config"}
"""Mappings that hold JSON as it was parsed: only they themselves are read-only."""

WRITES: list[Callable[[Any], object]] = [
    lambda mapping: mapping.__setitem__("a", 2),
    lambda mapping: mapping.__delitem__("a"),
    lambda mapping: mapping.__ior__({"b": 1}),
    lambda mapping: mapping.update(b=1),
    lambda mapping: mapping.setdefault("b", 1),
    lambda mapping: mapping.pop("a"),
    lambda mapping: mapping.popitem(),
    lambda mapping: mapping.clear(),
]


@pytest.mark.parametrize("write", WRITES)
def test_it_cannot_be_written_to(write: Callable[[Any], object]) -> None:
    mapping = ReadOnlyDict({"a": 1})
    with pytest.raises(TypeError, match="read-only"):
        write(mapping)
    assert mapping == {"a": 1}


def test_it_is_a_dict_for_readers() -> None:
    mapping = ReadOnlyDict({"a": [1]})
    assert json.loads(json.dumps(mapping)) == mapping
    for copied in (pickle.loads(pickle.dumps(mapping)), copy.deepcopy(mapping), copy.copy(mapping)):
        assert copied == mapping
        assert type(copied) is ReadOnlyDict
    assert copy.deepcopy(mapping)["a"] is not mapping["a"]
    assert ReadOnlyDict.fromkeys("ab", 1) == {"a": 1, "b": 1}
    changed = mapping | {"b": 2}
    changed["c"] = 3
    assert mapping == {"a": [1]}


def plain_dicts(value: Any, path: str) -> Iterator[str]:
    """Yield where an object, or what it holds, is a dict that can be changed."""
    if type(value) is dict:
        yield path
    if isinstance(value, Mapping):
        children: Any = () if path.rpartition(".")[2] in PARSED else value.items()
    elif dataclasses.is_dataclass(value):
        children = ((each.name, getattr(value, each.name)) for each in dataclasses.fields(value) if each.repr)
    elif isinstance(value, pydantic.BaseModel):
        children = ((name, getattr(value, name)) for name in type(value).model_fields)
    elif isinstance(value, tuple):
        children = enumerate(value)
    else:
        children = ()
    for name, child in children:
        yield from plain_dicts(child, f"{path}.{name}")


def test_no_object_holds_a_dict_that_can_be_changed(tmp_path: Path) -> None:
    folder = espalier_draft(source={"format": "exl3", "replaced_config": {"a.b": {}}}).write(tmp_path / "espalier")
    with ef.open_checkpoint(folder) as checkpoint:
        found = {
            "checkpoint": {field.name: getattr(checkpoint, field.name) for field in dataclasses.fields(checkpoint)},
            "plan": ef.plan(folder),
            "inspected": ef.inspect_checkpoint(folder),
            "verified": ef.verify_checkpoint(folder),
            "converted": ef.convert_checkpoint(folder, tmp_path / "plain", to="hf", dtype="bfloat16"),
        }
        del found["checkpoint"]["folder"], found["checkpoint"]["shards"]
        assert checkpoint.expert_banks
        faults = [fault for name, value in found.items() for fault in plain_dicts(value, name)]
    assert faults == ["checkpoint"]
