"""Regular expressions from a file, read so that it is known what they may do before they are run.

Python's engine goes back and tries another way where one has failed: a short expression can keep it busy for years, and
it cannot be stopped. `parse` makes a tree of an expression; `expression_steps` says how long matching may take, and
`required_literal` what every match contains. The matching itself is for ``re``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar, Final

# Sets of characters are the bits of a number: ASCII, and one bit for all others together.
OTHERS: Final = 1 << 128
ANYTHING: Final = (1 << 129) - 1


@dataclass(frozen=True, slots=True)
class Character:
    """One character."""

    among: int
    """The set that it is one of, or a set that holds that one."""
    literal: str = ""
    """The character, where there is only one."""
    can_be_empty: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Place:
    """No character: a border, an end, or what a group of its own looks ahead or back for."""

    before: int
    """The characters that may come next, unless the text ends here."""
    looked_for: Choice | None = None
    can_be_empty: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Repeat:
    """An item several times."""

    item: Item
    least: int
    most: int | None
    can_be_empty: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "can_be_empty", self.least == 0 or self.item.can_be_empty)


@dataclass(frozen=True, slots=True)
class Choice:
    """A group, or the whole: one of its branches, each a sequence of items."""

    branches: tuple[tuple[Item, ...], ...]
    can_be_empty: bool = field(init=False)

    def __post_init__(self) -> None:
        empty = any(all(item.can_be_empty for item in branch) for branch in self.branches)
        object.__setattr__(self, "can_be_empty", empty)


Item = Character | Place | Repeat | Choice


class NotUnderstoodError(ValueError):
    """An expression has something that `parse` does not know; the text says what."""


def parse(pattern: str) -> Choice:
    """Read an expression that ``re.compile`` takes.

    Raises NotUnderstoodError, for not all kinds are known here, re.error for some of those that ``re.compile`` refuses,
    and RecursionError.
    """
    return _Parser(pattern).whole()


def required_literal(choice: Choice) -> str:
    """Return a text that is part of everything that matches; "" where none is certain.

    Looking for it in a name is ten times as fast as matching.
    """
    if len(choice.branches) > 1:
        return ""
    best = run = ""
    for item in choice.branches[0]:
        run = run + item.literal if isinstance(item, Character) and item.literal else ""
        inner = required_literal(item) if isinstance(item, Choice) else ""
        best = max(best, run, inner, key=len)
    return best


def bits(characters: str) -> int:
    """Return the set of some characters."""
    result = 0
    for character in characters:
        result |= 1 << ord(character) if character.isascii() else OTHERS
    return result


_ASCII: Final = "".join(map(chr, range(128)))
_CLASSES: Final = {kind: bits("".join(re.findall(rf"\{kind}", _ASCII))) | OTHERS for kind in "dwsDWS"}
"""What ``\\d`` and the like can match, and a little more: beyond ASCII, everything."""

_CONTROLS: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_COUNT: Final = re.compile(r"\{(?!\})([0-9]*)(,?)([0-9]*)\}")
_SIGNS: Final = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_GROUP: Final = re.compile(r"\(\?(?::|>|P<\w+>)|\((?!\?)")
_LOOK: Final = re.compile(r"\(\?(?:=|!|<=|<!)")
_FLAGS: Final = re.compile(r"\(\?([ims]+)\)")
_ANY_CASE: Final = "(?i:"


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._any_case = self._any_line = False

    def whole(self) -> Choice:
        flags = _FLAGS.match(self._pattern)
        if flags is not None:
            self._at = flags.end()
            self._any_case, self._any_line = "i" in flags[1], "s" in flags[1]
        choice = self._choice()
        if self._at < len(self._pattern):
            raise re.error("a bracket that was not opened", self._pattern, self._at)
        return choice

    def _take(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _next(self) -> str:
        self._at += 1
        if self._at > len(self._pattern):
            raise re.error("an end where more is expected", self._pattern, self._at)
        return self._pattern[self._at - 1]

    def _choice(self) -> Choice:
        branches: list[tuple[Item, ...]] = []
        items: list[Item] = []
        while self._at < len(self._pattern) and self._pattern[self._at] != ")":
            if self._take("|"):
                branches.append(tuple(items))
                items = []
            else:
                items.append(self._repeated(self._item()))
        return Choice((*branches, tuple(items)))

    def _repeated(self, item: Item) -> Item:
        count = _COUNT.match(self._pattern, self._at)
        if count is not None:
            self._at = count.end()
            least = int(count[1] or 0)
            most = least if not count[2] else int(count[3]) if count[3] else None
        else:
            sign = self._pattern[self._at : self._at + 1]
            if sign not in _SIGNS or not sign:
                return item
            self._at += 1
            least, most = _SIGNS[sign]
        # As few as possible first, or no going back: as many ways, or less.
        _ = self._take("?") or self._take("+")
        return Repeat(item, least, most)

    def _item(self) -> Item:
        for kind in (_GROUP, _LOOK):
            begin = kind.match(self._pattern, self._at)
            if begin is not None:
                self._at = begin.end()
                choice = self._group()
                return choice if kind is _GROUP else Place(ANYTHING, choice)
        if self._take(_ANY_CASE):
            before, self._any_case = self._any_case, True
            choice = self._group()
            self._any_case = before
            return choice
        character = self._next()
        if character == "(":
            raise NotUnderstoodError(f"a group that begins with {self._pattern[self._at - 1 : self._at + 3]!r}")
        if character == "[":
            return Character(self._set())
        if character == "\\":
            return self._escaped()
        if character == ".":
            return Character(ANYTHING if self._any_line else ANYTHING & ~bits("\n"))
        if character in "^$":
            return Place(bits("\n") if character == "$" else ANYTHING)
        return self._one(character)

    def _group(self) -> Choice:
        choice = self._choice()
        if not self._take(")"):
            raise re.error("a bracket that is not closed", self._pattern, self._at)
        return choice

    def _one(self, character: str) -> Character:
        if self._any_case:
            return Character(bits(character + character.lower() + character.upper()) | OTHERS)
        return Character(bits(character), character)

    def _escaped(self) -> Item:
        character = self._next()
        if character in _CLASSES:
            return Character(_CLASSES[character])
        if character in "bBAZ":
            return Place(0 if character == "Z" else ANYTHING)
        return self._one(self._plain(character))

    def _plain(self, escaped: str) -> str:
        if escaped in _CONTROLS:
            return _CONTROLS[escaped]
        if escaped.isalnum():
            raise NotUnderstoodError(f"\\{escaped}")
        return escaped

    def _set(self) -> int:
        others = self._take("^")
        among = 0
        first = True
        while first or not self._take("]"):
            first = False
            low = high = self._member()
            if self._pattern.startswith("-", self._at) and not self._pattern.startswith("-]", self._at):
                self._at += 1
                high = self._member()
            if isinstance(low, int) or isinstance(high, int):
                if low is not high:
                    raise NotUnderstoodError("a range of more than characters")
                among |= low if isinstance(low, int) else 0
                continue
            among |= bits(high) | bits("".join(map(chr, range(ord(low), min(ord(high), 127) + 1))))
        if self._any_case:
            letters = "".join(character for character in _ASCII if among & bits(character))
            among |= bits(letters.lower() + letters.upper()) | OTHERS
        return ANYTHING & ~among | OTHERS if others else among

    def _member(self) -> str | int:
        character = self._next()
        if character == "[" or self._pattern[self._at - 1 : self._at + 1] in ("--", "&&", "~~", "||"):
            raise NotUnderstoodError("a set in a set")  # Python warns that it may become one
        if character != "\\":
            return character
        character = self._next()
        if character in _CLASSES:
            return _CLASSES[character]
        return "\b" if character == "b" else self._plain(character)
