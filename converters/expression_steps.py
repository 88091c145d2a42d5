"""How long matching a regular expression may take: a bound on the steps of an engine that goes back and tries again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, NamedTuple

from espalier_format.converters.expression import ANYTHING, Character, Choice, Item, Place, Repeat

ENDLESS: Final = 1 << 64
"""What `most_steps` never exceeds: too much to be counted."""

_END: Final = ANYTHING + 1
"""The bit of a set of characters, of those that may come next, for nothing: the expression may end."""


def most_steps(expression: Choice, length: int) -> int:
    """Return the most characters that are looked at to match a text of ``length`` characters from its beginning.

    A bound, not a close one: where several parts can share the same characters, the ways of all of them are multiplied.
    """
    return min(_Count(length, _size(expression)).of(expression, _END).steps, ENDLESS)


class _Cost(NamedTuple):
    ways: int
    """The most ways to match from one place, each of which is tried if what comes after it fails."""
    steps: int
    """The most steps to try them all."""


@dataclass(frozen=True, slots=True)
class _Count:
    length: int
    size: int
    """Items of the whole expression: no more than these are looked at to find that what comes next cannot match."""

    def of(self, item: Item, after: int) -> _Cost:
        """Return what an item costs at one place; ``after`` is what may come next when it has matched."""
        if isinstance(item, Character):
            return _Cost(1, 1)
        if isinstance(item, Place):
            return _Cost(1, 1 + (self.of(item.looked_for, _END).steps if item.looked_for else 0))
        if isinstance(item, Choice):
            costs = [self._in_turn(branch, after) for branch in item.branches]
            begins = [_begin(branch, after) for branch in item.branches]
            ways = [cost.ways for cost in costs]
            exclusive = not any(one & other for one, other in combinations(begins, 2))
            return _limited(max(ways) if exclusive else sum(ways), sum(cost.steps for cost in costs))
        return self._repeated(item, after)

    def _in_turn(self, items: Sequence[Item], after: int) -> _Cost:
        ways, steps = 1, 1
        for position, item in enumerate(items):
            cost = self.of(item, _begin(items[position + 1 :], after))
            steps += ways * cost.steps
            ways *= cost.ways
        return _limited(ways, steps)

    def _repeated(self, repeat: Repeat, after: int) -> _Cost:
        begin = _begin((repeat.item,), 0)
        most = self.length if repeat.most is None else min(repeat.most, self.length)
        least = min(repeat.least, most)
        cost = self.of(repeat.item, (begin if most > 1 else 0) | after)
        if most > 1 and _can_be_empty(repeat.item):
            return _Cost(ENDLESS, ENDLESS)  # nothing, any number of times
        # Each number of times is tried; it is a way, unless the next character tells whether there is one more.
        unsure = bool(begin & after)
        if cost.ways == 1:
            if unsure or after == _END:
                return _limited(most - least + 1 if unsure else 1, (most + 1) * cost.steps)
            return _limited(1, (most + 1) * (cost.steps + self.size))
        if most * cost.ways.bit_length() > 128:
            return _Cost(ENDLESS, ENDLESS)
        ways = sum(cost.ways**count for count in range(most + 1))
        return _limited(ways, ways * cost.steps)


def _limited(ways: int, steps: int) -> _Cost:
    return _Cost(min(ways, ENDLESS), min(steps, ENDLESS))


def _begin(items: Sequence[Item], after: int) -> int:
    """Return the characters that may come next before ``items``, which may be followed by ``after``.

    `_END` stands beside them where the expression may end there; nothing can fail then, so that nothing else is tried.
    """
    result = 0
    for position, item in enumerate(items):
        if isinstance(item, Place):
            if item.looked_for is not None:
                return ANYTHING | _END  # to look for it takes more than one step
            # What comes next must fit the place too; and where the expression ends with it, it can still fail.
            rest = _begin(items[position + 1 :], after)
            return result | (item.before if rest & _END else rest & item.before)
        if isinstance(item, Character):
            return result | item.among
        if isinstance(item, Choice):
            rest = _begin(items[position + 1 :], after)
            for branch in item.branches:
                result |= _begin(branch, rest)
            return result
        result |= _begin((item.item,), _begin(items[position + 1 :], after) if _can_be_empty(item.item) else 0)
        if item.least > 0 and not _can_be_empty(item.item):
            return result
    return result | after


def _can_be_empty(item: Item) -> bool:
    if isinstance(item, Choice):
        return any(all(map(_can_be_empty, branch)) for branch in item.branches)
    if isinstance(item, Repeat):
        return item.least == 0 or _can_be_empty(item.item)
    return isinstance(item, Place)


def _size(item: Item) -> int:
    if isinstance(item, Choice):
        return 1 + sum(_size(each) for branch in item.branches for each in branch)
    if isinstance(item, Repeat):
        return 1 + _size(item.item)
    return 1 if isinstance(item, Character) or item.looked_for is None else 1 + _size(item.looked_for)
