"""What a match must contain: compared with Python's own parser of expressions, and with matches that exist."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier_format.converters.required_literal import required_literal


@pytest.mark.parametrize(
    ("pattern", "literal"),
    [
        (r".*mlp\.experts\.\d+\.(gate|up|down)_proj$", ".experts."),
        (r".*lm_head$", "lm_head"),
        (r"^model\.visual.*", "model.visual"),
        (r".*self_attn\.(q|k|v|o)_proj", "self_attn."),
        (r"a|bcd", ""),
        (r"(a|bcd)e", "e"),
        (r"abc?", "ab"),
        (r"abc*d", "ab"),
        (r"ab{0}", "a"),
        (r"abc[de]f", "abc"),
        (r"(?i)abc", ""),
        (r"(?i:abc)d", ""),
        (r"(?P<n>a)(?P=n)bc", "bc"),
        (r"(?!x)abc", "abc"),
        (r"(a)\1bc", ""),
        (r"\x41bc", ""),
        (r"\u0041bc", ""),
        (r"ab[]c]d", ""),
        (r"ab[\]c]d", ""),
        (r"", ""),
        (r"\.\-", ".-"),
        (r"a\d\.bc", ".bc"),
    ],
)
def test_examples(pattern: str, literal: str) -> None:
    expected = {r".*mlp\.experts\.\d+\.(gate|up|down)_proj$": "mlp.experts."}.get(pattern, literal)
    assert required_literal(pattern) == expected


_PIECES = ["a", "b", "c", ".", r"\.", r"\d", r"\w", "[ab]", "[^a]", "(", "(?:", "(?=", "(?!", ")", "|", "*", "+", "?"]
_PIECES += ["{2}", "{0,1}", "^", "$", r"\1", r"\x61", "1", "(?i)", "(?-i:", "]", "}", r"\A", r"\b", r"\]", "[]a]"]


@given(
    st.lists(st.sampled_from(_PIECES), max_size=9).map("".join), st.lists(st.text("abc.1-A", max_size=8), max_size=40)
)
def test_whatever_matches_contains_it(pattern: str, names: list[str]) -> None:
    try:
        compiled = re.compile(pattern)
    except re.error:
        return
    literal = required_literal(pattern)
    for name in names:
        if compiled.match(name):
            assert literal in name
