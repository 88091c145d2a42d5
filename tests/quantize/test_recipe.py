"""Recipes and sensitivity files."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from espalier_format.checkpoint.components import Component
from espalier_format.errors import CodebookError, LimitError, MalformedError, MissingFileError, SchemaError, UsageError
from espalier_format.quantize.presets import even_recipe, preset
from espalier_format.quantize.recipe import Recipe, read_recipe
from espalier_format.quantize.sensitivity import module_weights, read_sensitivity

RECIPE = """
bits = 2.12

[[rule]]
match = ["*.self_attn.*", "lm_head"]
codebook = "int6@4"
rotation = 64

[[rule]]
component = ["experts", "shared-expert"]
match = "*.up_proj"
codebook = ["int5@3", "e2m1@1", "e2m1@2"]
rotation = { out = 32 }
average = 2.25

[[rule]]
match = "*"
keep = true
"""


def _recipe(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_recipe_is_read(tmp_path: Path) -> None:
    recipe = read_recipe(_recipe(tmp_path, RECIPE))
    assert recipe.bits == 2.12
    attention, experts, rest = recipe.rules
    assert [book.name for book in attention.codebooks] == ["int6@4"]
    assert attention.rotation == (64, 64)
    assert [book.name for book in experts.codebooks] == ["e2m1@1", "e2m1@2", "int5@3"]
    assert experts.rotation == (None, 32)
    assert experts.average == Fraction(9, 4)
    assert experts.components == (Component.EXPERTS, Component.SHARED_EXPERT)
    assert rest.codebooks == ()


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    """Some editors put one first, and a person does not see it."""
    assert read_recipe(_recipe(tmp_path, f"\ufeff{RECIPE}")) == read_recipe(_recipe(tmp_path, RECIPE))
    with pytest.raises(SchemaError, match="not a TOML document"):
        read_recipe(_recipe(tmp_path, f"\ufeff\ufeff{RECIPE}"))


def test_the_first_rule_that_matches_decides(tmp_path: Path) -> None:
    recipe = read_recipe(_recipe(tmp_path, RECIPE))
    names = {
        "model.layers.0.self_attn.q_proj": 0,
        "lm_head": 0,
        "model.layers.0.mlp.experts.3.up_proj": 1,
        "model.layers.0.mlp.up_proj": 2,  # of another component
        "model.layers.0.mlp.experts.3.down_proj": 2,
        "LM_HEAD": 2,
    }
    for name, number in names.items():
        assert recipe.rule_for(name) == (number, recipe.rules[number]), name
    assert Recipe("none", recipe.rules[:2]).rule_for("model.layers.0.mlp.up_proj") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[rule]\n", "not a TOML document"),
        ("bits = 2\n", r"at least one \[\[rule\]\]"),
        ("rule = 3\n", r"at least one \[\[rule\]\]"),
        ("colour = 1\n[[rule]]\nmatch = 'a'\nkeep = true\n", "'colour' is not a key"),
        ("bits = 0\n[[rule]]\nmatch = 'a'\nkeep = true\n", "bits must be a number"),
        ("[[rule]]\nkeep = true\n", "rule 1 needs match or component"),
        ("[[rule]]\nmatch = 'a'\n", "rule 1 needs either codebook or keep"),
        ("[[rule]]\nmatch = 'a'\nkeep = true\ncodebook = 'e2m1@2'\n", "rule 1 needs either codebook or keep"),
        ("[[rule]]\nmatch = 'a'\nkeep = 1\n", "keep must be true or false"),
        ("[[rule]]\nmatch = 'a'\nkeep = true\n[[rule]]\nmatch = 3\nkeep = true\n", "rule 2: match must be a string"),
        ("[[rule]]\nmatch = 'a'\ncodebook = []\n", "codebook must name 1 to 36"),
        ("[[rule]]\nmatch = 'a'\ncodebook = 'e2m1@2'\nrotation = 48\n", "rotation must be 0, 32, 64, 128, 256"),
        ("[[rule]]\nmatch = 'a'\ncodebook = 'e2m1@2'\nrotation = true\n", "rotation must be"),
        ("[[rule]]\nmatch = 'a'\ncodebook = 'e2m1@2'\nrotation = {inn = 32}\n", "the keys in and out"),
        ("[[rule]]\nmatch = 'a'\ncodebook = 'e2m1@2'\naverage = 2\n", "average needs more than one"),
        ("[[rule]]\nmatch = 'a'\nkeep = true\nrotation = 32\n", "neither rotation nor average"),
        ("[[rule]]\ncomponent = 'head of state'\nkeep = true\n", "'head of state' is no component"),
        ("[[rule]]\nmatch = 'a'\nwidth = 2\nkeep = true\n", "rule 1: 'width' is not a key"),
    ],
)
def test_a_wrong_recipe_is_a_schema_error(text: str, message: str, tmp_path: Path) -> None:
    path = _recipe(tmp_path, text)
    with pytest.raises(SchemaError, match=message) as caught:
        read_recipe(path)
    assert caught.value.path == str(path)


def test_an_unknown_codebook_names_its_rule(tmp_path: Path) -> None:
    with pytest.raises(CodebookError, match="rule 1: unknown codebook 'int4@4'"):
        read_recipe(_recipe(tmp_path, "[[rule]]\nmatch = 'a'\ncodebook = 'int4@4'\n"))


def test_a_recipe_that_is_not_there_or_too_large(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        read_recipe(tmp_path / "recipe.toml")
    with pytest.raises(LimitError):
        read_recipe(_recipe(tmp_path, "#" * 1_000_001))


PUBLISHED = {
    "model.language_model.layers.0.mlp.experts.7.down_proj": ["e2m1@1", "e2m1@2", "int5@3"],
    "model.language_model.layers.0.mlp.shared_expert.up_proj": ["int6@4"],
    "model.language_model.layers.3.self_attn.q_proj": ["int6@4"],
    "model.language_model.layers.0.linear_attn.in_proj_qkv": ["int6@4"],
    "model.language_model.layers.0.linear_attn.in_proj_a": [],
    "model.visual.blocks.0.attn.qkv": [],
    "model.language_model.embed_tokens": [],
    "mtp.layers.0.mlp.experts.1.up_proj": ["int5@3"],
    "mtp.layers.0.self_attn.q_proj": [],
    "mtp.fc": [],
    "lm_head": ["int8@6"],
}


def test_the_preset_is_the_published_layout() -> None:
    recipe = preset("espalier")
    for name, codebooks in PUBLISHED.items():
        found = recipe.rule_for(name)
        assert [book.name for book in found[1].codebooks] == codebooks if found else not codebooks, name
    with pytest.raises(UsageError, match="unknown preset"):
        preset("mine")


def test_the_even_recipe_offers_every_width() -> None:
    _, rule = even_recipe(exl3=False).rule_for("model.layers.0.mlp.up_proj") or pytest.fail("no rule")
    assert [book.width for book in rule.codebooks] == ["1", "1.5", "2", "2.5", "3", "3.5", "4", "5", "6"]
    _, rule = even_recipe(exl3=True).rule_for("model.layers.0.mlp.up_proj") or pytest.fail("no rule")
    widths = ["1", "1.5", "2", "2.5", "3", "3.5", "4", "5", "6", "7", "8"]
    assert [book.name for book in rule.codebooks] == [f"exl3-mul1@{width}" for width in widths]


def test_sensitivity_is_read_from_json_and_toml(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"a.*": 2, "*": 0.5}')
    (tmp_path / "s.toml").write_text('"a.*" = 2\n"*" = 0.5\n')
    for name in ("s.json", "s.toml"):
        assert read_sensitivity(tmp_path / name) == {"a.*": 2.0, "*": 0.5}


@pytest.mark.parametrize("content", ["[]", '{"a": -1}', '{"a": "1"}', '{"a": true}', '{"a": Infinity}', '{"a": NaN}'])
def test_wrong_sensitivity_is_a_schema_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(SchemaError):
        read_sensitivity(tmp_path / "s.json")


@pytest.mark.parametrize("digits", [400, 5000])
@pytest.mark.parametrize("name", ["s.json", "s.toml"])
def test_integers_beyond_all_floats(name: str, digits: int, tmp_path: Path) -> None:
    number = "1" + digits * "0"
    (tmp_path / name).write_text(f'{{"a": {number}}}' if name == "s.json" else f"a = {number}\n")
    with pytest.raises((SchemaError, MalformedError)) as caught:
        read_sensitivity(tmp_path / name)
    assert caught.value.path == str(tmp_path / name)
    (tmp_path / "recipe.toml").write_text(f'bits = {number}\n[[rule]]\nmatch = "*"\nkeep = true\n')
    with pytest.raises(SchemaError):
        read_recipe(tmp_path / "recipe.toml")


def test_toml_that_nests_too_deep(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text("a = " + 50_000 * "[" + 50_000 * "]" + "\n")
    for read in (read_sensitivity, read_recipe):
        with pytest.raises(SchemaError, match="not a TOML document"):
            read(tmp_path / "s.toml")


def test_dotted_keys_of_toml_are_explained(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text("a.b = 2\n")
    with pytest.raises(SchemaError, match="must be quoted"):
        read_sensitivity(tmp_path / "s.toml")


def test_the_first_entry_that_matches_gives_the_weight() -> None:
    table = {"a.b": 3.0, "a.*": 2.0, "*.d": 5.0, "a.c": 7.0}
    assert module_weights(table, ["a.b", "a.c", "a.d", "x.d", "y"]) == {
        "a.b": 3.0, "a.c": 2.0, "a.d": 2.0, "x.d": 5.0, "y": 1.0
    }  # fmt: skip
    with pytest.raises(UsageError, match="no linear module matches 'z'"):
        module_weights({"z": 1.0}, ["a"])
