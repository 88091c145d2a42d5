"""What a config says, against what the library that is installed makes of it: presets, spellings, classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.utils.match import match_targets

from espalier_format.converters.compressed_tensors_schemes import Scheme, Schemes, read_schemes
from espalier_format.errors import EspalierError, SourceError

PATH = Path("config.json")
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


def _read(groups: object) -> Schemes:
    block = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    return read_schemes({"quantization_config": block}, PATH)


def _scheme(weights: QuantizationArgs) -> tuple[int, bool, str, int]:
    size = weights.group_size if weights.strategy == "group" else 0
    return weights.num_bits, weights.symmetric, str(weights.strategy), size or 0


@pytest.mark.parametrize("name", [*PRESET_SCHEMES, "w4a16", "Int8"])
def test_presets_are_those_of_the_library(name: str) -> None:
    theirs = QuantizationConfig(config_groups={name: ["Linear"]}).config_groups[name]
    weights = theirs.weights
    if name == "W8A16" or (weights is not None and weights.type != "int"):
        with pytest.raises(SourceError, match=f"config_groups.{name}"):
            _read({name: ["Linear"]})
        return
    schemes = _read({name: ["Linear"]})
    scheme = schemes.resolve("a")
    if weights is None:
        assert scheme is None
    else:
        assert isinstance(scheme, Scheme)
        assert (scheme.bits, scheme.symmetric, scheme.strategy, scheme.group_size) == _scheme(weights)
    assert bool(schemes.warnings) is (theirs.input_activations is not None)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("num_bits", [4.0, 4.5, "4", "4.0", " 4 ", "x", None, [], ""]),
        ("group_size", [32.0, 32.5, "32", 0, -1, -1.0, None, -2, 1e300]),
        ("type", ["INT", "Int", "FLOAT", "x"]),
        ("strategy", ["GROUP", "Group", "x"]),
        ("symmetric", [0, 1, 0.0, 2, "false", "False", "no", "off", "t", "x", None]),
        ("actorder", ["weight", "static", False]),
        ("dynamic", [0, False]),
    ],
)
def test_values_are_taken_as_the_library_takes_them(key: str, values: list[object]) -> None:
    for value in values:
        weights = {**INT4, key: value}
        try:
            theirs = _scheme(QuantizationArgs(**weights)) if str(value).lower() != "float" else None
        except (ValueError, TypeError):
            theirs = None
        try:
            scheme = _read({"g": {"targets": ["Linear"], "weights": weights}}).groups[0].scheme
        except EspalierError:
            ours = None
        else:
            assert isinstance(scheme, Scheme)
            ours = (scheme.bits, scheme.symmetric, scheme.strategy, scheme.group_size)
        assert ours == theirs, value


def test_a_group_size_of_zero_says_nothing_where_there_are_no_groups() -> None:
    for strategy in ("channel", "tensor"):
        weights = {**INT8, "strategy": strategy, "group_size": 0}
        scheme = _read({"g": {"targets": ["Linear"], "weights": weights}}).resolve("a")
        assert scheme is not None
        assert (scheme.bits, scheme.symmetric, scheme.strategy, scheme.group_size) == _scheme(
            QuantizationArgs(**weights)
        )


def test_ordering_is_read_whatever_its_case() -> None:
    for order in ("Group", "WEIGHT"):  # early releases put it into lower case
        scheme = _read({"g": {"targets": ["Linear"], "weights": {**INT4, "actorder": order}}}).resolve("a")
        assert scheme is not None
        assert scheme.reordered is (order == "Group")


GROUPS = {
    "vision": ({"group_0": ["re:.*language_model.*"], "group_1": ["Linear"]}, "model.visual.blocks.0.mlp.linear_fc1"),
    "vision tower": ({"group_0": ["re:^language_model\\."], "group_1": ["Linear"]}, "model.vision_tower.layers.0.fc"),
    "decoder": ({"group_0": ["re:.*language_model.*"], "group_1": ["Linear"]}, "model.language_model.layers.0.up"),
    "embedding": ({"group_0": ["Linear"], "group_1": ["Embedding"]}, "model.embed_tokens"),
    "embedding first": ({"group_0": ["Embedding"], "group_1": ["Linear"]}, "model.embed_tokens"),
    "no embedding": ({"group_0": ["Embedding"], "group_1": ["Linear"]}, "model.layers.0.mlp.up_proj"),
}


@pytest.mark.parametrize("case", GROUPS)
def test_the_group_of_a_module_is_the_one_that_the_library_finds(case: str) -> None:
    groups, name = GROUPS[case]
    module = torch.nn.Embedding(2, 2) if "embed" in name else torch.nn.Linear(2, 2)
    every = [target for targets in groups.values() for target in targets]
    first = match_targets(name, module, every)[0]
    theirs = next(group for group, targets in groups.items() if first in targets)
    weights = {"group_0": INT4, "group_1": INT8}
    for order in (list(groups), list(reversed(groups))):
        stated = {group: {"targets": groups[group], "weights": weights[group]} for group in order}
        for prepared in (False, True):
            schemes = _read(stated)
            if prepared:
                schemes.prepare([name])
            scheme = schemes.resolve(name)
            assert scheme is not None
            assert scheme.group == theirs


def test_an_embedding_that_only_linear_could_mean_has_its_scheme() -> None:
    """As the library's own dequantizer reads it, which knows names alone."""
    scheme = _read({"g": {"targets": ["Linear"], "weights": INT8}}).resolve("model.embed_tokens")
    assert scheme is not None
