"""What a match must contain: compared with Python's own parser of expressions, and with matches that exist."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import example, given
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
        (r"ab{0,12}c", "a"),
        (r".*layers\.\d{1,2}\.mlp", "layers."),
        (r"a{x}bc", "bc"),
        (r"a{(x}bc)?d", "d"),
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
_PIECES += ["{2}", "{0,1}", "{,1}", "{1,}", "{", ",", "^", "$", r"\1", r"\x61", "1", "(?i)", "(?-i:", "]", "}", r"\A"]
_PIECES += [r"\b", r"\]", "[]a]"]


# Every short name: that a drawn one matches would be luck.
_NAMES = ["".join(letters) for length in range(5) for letters in itertools.product("ab1.]{,}", repeat=length)]


@given(st.lists(st.sampled_from(_PIECES), max_size=9).map("".join))
@example("a{0,1}")
@example("a{,}b{1")
@example("a{}b{,2}1{2,}")
def test_whatever_matches_contains_it(pattern: str) -> None:
    try:
        compiled = re.compile(pattern)
    except re.error:
        return
    literal = required_literal(pattern)
    for name in _NAMES:
        if literal not in name:
            assert not compiled.match(name)
