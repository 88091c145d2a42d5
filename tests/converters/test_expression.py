"""Expressions from a file: read as ``re`` reads them, with a bound on the work that holds, and a text in every match.

The bound is checked with an engine of the tests' own, which goes back and tries again as Python's does, and counts.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from espalier_format.converters.expression import (
    Character,
    Choice,
    Item,
    NotUnderstoodError,
    Repeat,
    bits,
    parse,
    required_literal,
)
from espalier_format.converters.expression_steps import ENDLESS, most_steps

_PIECES = ["a", "b", "1", ".", r"\.", r"\d", r"\w", "[ab]", "[^a]", "[b-]", "[]a]", "(", "(?:", "(?=", "(?!", "(?<!"]
_PIECES += [")", ")", "|", "*", "+", "?", "{2}", "{0,1}", "{,2}", "{1,}", "{", ",", "}", "^", "$", r"\b", r"\Z", "]"]
_PIECES += ["(?i)", "(?i:", "(?s)", "(?:$|", "(?:a?)?"]

# Every short name: that a drawn one matches would be luck.
_NAMES = ["".join(letters) for length in range(5) for letters in itertools.product("abA1.,", repeat=length)]


def _compiles(pattern: str) -> re.Pattern[str] | None:
    try:
        return re.compile(pattern)
    except re.error:
        return None


@pytest.mark.parametrize(
    ("pattern", "literal"),
    [
        (r".*mlp\.experts\.\d+\.(gate|up|down)_proj$", "mlp.experts."),
        (r".*lm_head$", "lm_head"),
        (r"^model\.visual.*", "model.visual"),
        (r".*self_attn\.(q|k|v|o)_proj", "self_attn."),
        (r".*layers\.\d{1,2}\.mlp", "layers."),
        (r"a|bcd", ""),
        (r"(a|bcd)e", "e"),
        (r"(?:abc)d", "abc"),
        (r"(?:abc)?d", "d"),
        (r"abc?", "ab"),
        (r"abc*d", "ab"),
        (r"ab{0}", "a"),
        (r"ab{0,12}c", "a"),
        (r"a{x}bc", "a{x}bc"),
        (r"abc[de]f", "abc"),
        (r"(?i)abc", ""),
        (r"(?!x)abc", "abc"),
        (r"(?P<n>a)bc", "bc"),
        (r"ab[]c]d", "ab"),
        (r"ab[\]c]d", "ab"),
        (r"", ""),
        (r"\.\-", ".-"),
        (r"a\d\.bc", ".bc"),
    ],
)
def test_required_literal(pattern: str, literal: str) -> None:
    assert required_literal(parse(pattern)) == literal


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"(a)\1bc", r"(?P<n>a)(?P=n)", r"(a)?(?(1)b|c)", r"\x41bc", r"\u0041bc", r"\N{DIGIT ONE}"),
        *("(?#no)a", "(?x)a", "[[a]", "[a||b]", "[a&&b]"),
    ],
)
@pytest.mark.filterwarnings("ignore:Possible set:FutureWarning", "ignore:Possible nested set:FutureWarning")
def test_what_is_not_understood(pattern: str) -> None:
    assert _compiles(pattern) is not None
    with pytest.raises(NotUnderstoodError):
        parse(pattern)


@given(st.lists(st.sampled_from(_PIECES), max_size=9).map("".join))
@example("a{0,1}")
@example("a{,}b{1")
@example("a{}b{,2}1{2,}")
@example("(?i)a[^b]")
@example("[b-a]|a")
@example("(|a){2}1")
def test_read_as_python_does(pattern: str) -> None:
    compiled = _compiles(pattern)
    assume(compiled is not None)
    try:
        choice = parse(pattern)
    except NotUnderstoodError:
        assume(False)
    literal = required_literal(choice)
    for name in _NAMES:
        if compiled.match(name):
            assert literal in name
            # Sets may hold more than the expression's, never less.
            assert _Engine(name).matches(choice)


@given(st.lists(st.sampled_from(_PIECES), max_size=9).map("".join), st.sampled_from([1, 4, 7]), st.data())
@example("(a?){3}a{3}", 7, None)
@example(".*.*.*[^.]", 7, None)
@example("(?:a|a)*1", 7, None)
@example("(?:a|aa)(?:a|aa)1", 7, None)
@example("(?:a?b?)*1", 7, None)
@example("(?=.*.*1).*(?!.*.*)1", 7, None)
@example("[ab]*(?:$|\\Z)(?:$|\\Z)(?:$|)($)?[0]", 7, None)
@example("a*(?:\\B|\\B)(?:\\B|\\B)1", 7, None)
@example("(?:a?)?(?:a?)?(?:a?)?1", 7, None)
def test_no_more_steps_than_said(pattern: str, length: int, data: st.DataObject | None) -> None:
    assume(_compiles(pattern) is not None)
    try:
        choice = parse(pattern)
    except NotUnderstoodError:
        assume(False)
    bound = most_steps(choice, length)
    assume(bound < 100_000)
    texts = ["a" * length, "1" * length, "ab" * (length // 2)]
    texts += [data.draw(st.text("ab1.", min_size=length, max_size=length))] if data else []
    for text in texts:
        engine = _Engine(text)
        engine.matches(choice)
        assert engine.steps <= bound


@pytest.mark.parametrize(
    "pattern",
    [
        *(".?" * 60 + r"[^\W\w]", "(.|.)*30", "(?:a|a)*25", ".*" * 6 + "[^a]", "(a+)+b", "(a?){30}a{30}"),
        *("(x?){28}x{28}[y]", "(?:x|xx)" * 40 + "[y]", "x?" * 40 + "x{3}[y]", "(.*?,){11}P"),
        *("(?:a*)*b", "(?:|a)*b", "(?=(a+)+b)c", "[a-z]*" + r"(?:$|\Z)" * 40 + "[0]"),
    ],
)
def test_endless(pattern: str) -> None:
    assert most_steps(parse(pattern), 256) > 10**9


@pytest.mark.parametrize(
    "pattern",
    [
        r".*q_proj.*|.*k_proj.*|.*v_proj.*",
        r".*gate[^_].*|.*router.*|.*shared_expert_gate.*",
        r".*\.layers\.\d+\.mlp\.experts\.\d+\..*_proj.*",
        r".*layers\.\d{1,2}\.mlp\.experts\.\d{1,3}\..*_proj.*",
        r"^(?!.*lm_head)(?!.*vision)(?!.*router)(?!.*embed)(?!.*norm).*$",
        r"layers\.(0|1|2){1}\.x",
        r"^(?:model\.)?layers\.([0-9]|[1-3][0-9])\.(mlp|self_attn)\.\w+_proj$",
        r"(\w+\.)*lm_head",
        r".*layers.*mlp.*proj",
        r"(?i:model)\..*",
    ],
)
def test_what_people_write_takes_few_steps(pattern: str) -> None:
    assert most_steps(parse(pattern), 256) < 10**8


@pytest.mark.parametrize("pattern", [r".*model.*layers.*mlp.*proj", r".*experts.*(gate|up).*proj.*"])
def test_several_repeats_take_few_steps_on_names_as_they_are(pattern: str) -> None:
    assert most_steps(parse(pattern), 120) < 10**8


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "(?:a?)?" * 290,
            "(a)" * 680,
            "a?" * 1000,
            "()" * 1000,
            r"\b" * 1000,
            "^" * 1500,
            "(a|b)" * 400,
            "a|" * 1000 + "a",
        ),
        *("(?:" * 100 + "a" + ")?" * 100, "(?:" * 100 + "a" + "|b)" * 100, "(?=" * 100 + "a" + ")" * 100),
    ],
)
def test_the_bound_itself_takes_no_time(pattern: str) -> None:
    choice = parse(pattern)
    started = time.perf_counter()
    assert most_steps(choice, 256) > 0
    required_literal(choice)
    assert time.perf_counter() - started < 2


def test_what_cannot_be_counted_is_endless() -> None:
    assert most_steps(parse("(a|aa)" * 300), 256) == ENDLESS


class _Engine:
    """Matches by going back and trying again, and counts the characters and places that it looks at."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.steps = 0

    def matches(self, choice: Choice) -> bool:
        return any(True for _ in self._choice(choice, 0))

    def _choice(self, choice: Choice, at: int) -> Iterator[int]:
        for branch in choice.branches:
            yield from self._items(branch, at)

    def _items(self, items: tuple[Item, ...], at: int) -> Iterator[int]:
        if not items:
            yield at
            return
        for end in self._item(items[0], at):
            yield from self._items(items[1:], end)

    def _item(self, item: Item, at: int) -> Iterator[int]:
        if isinstance(item, Choice):
            yield from self._choice(item, at)
        elif isinstance(item, Repeat):
            yield from self._repeat(item, at, 0)
        elif isinstance(item, Character):
            self.steps += 1
            if at < len(self.text) and item.among & bits(self.text[at]):
                yield at + 1
        else:
            self.steps += 1
            if item.looked_for is not None:
                # Forward, back, and whether it must be there or not, look alike in the tree: all ways are followed.
                any(True for _ in self._choice(item.looked_for, at))
            if at == len(self.text) or item.before & bits(self.text[at]):
                yield at

    def _repeat(self, item: Repeat, at: int, count: int) -> Iterator[int]:
        if item.most is None or count < item.most:
            for end in self._item(item.item, at):
                if end > at or count < item.least:  # nothing, once more, would never end
                    yield from self._repeat(item, end, count + 1)
        if count >= item.least:
            yield at
