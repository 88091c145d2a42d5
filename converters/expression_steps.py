"""How long matching a regular expression may take: a bound on the steps of an engine that goes back and tries again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Final, NamedTuple

from espalier_format.converters.expression import ANYTHING, Character, Choice, Item, Place, Repeat

ENDLESS: Final = 1 << 64
"""What `most_steps` never exceeds: too much to be counted."""

# Beside the characters that may come next, a set of them has two more bits.
_END: Final = ANYTHING + 1
"""The expression may end here. Nothing can fail then, so that nothing else is tried."""
_CROWDED: Final = _END << 1
"""Before the next character there is more than simple items, each of which is passed in one way."""


def most_steps(expression: Choice, length: int) -> int:
    """Return the most characters that are looked at to match a text of ``length`` characters from its beginning.

    A bound, not a close one. It takes time in proportion to the expression, and to how deep its groups are nested.
    """
    return min(_Count(length, _size(expression)).of(expression, _END).steps, ENDLESS)


class _Cost(NamedTuple):
    ways: int
    """The most ways to match from one place, each of which is tried if what comes after it fails."""
    steps: int
    """The most steps to try them all."""
    once: int = 0
    """Of what is repeated any number of times, each number a way: the steps to try it once. Else 0."""


_ENDLESS: Final = _Cost(ENDLESS, ENDLESS)


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
            return self._chosen(item, after)
        return self._repeated(item, after)

    def _chosen(self, choice: Choice, after: int) -> _Cost:
        costs = [self._in_turn(branch, after) for branch in choice.branches]
        empty = sum(all(item.can_be_empty for item in branch) for branch in choice.branches)
        exclusive, begun = empty < 2, 0
        for branch in choice.branches:
            begin = _begin(branch, after) & ~_CROWDED
            exclusive = exclusive and not begin & begun
            begun |= begin
        ways = [cost.ways for cost in costs]
        return _limited(max(ways) if exclusive else sum(ways), sum(cost.steps for cost in costs))

    def _in_turn(self, items: Sequence[Item], after: int) -> _Cost:
        rests = [after]
        for item in reversed(items):
            rests.append(_before(item, rests[-1]))
        ways, steps, shared = 1, 1, 0
        for item, rest in zip(items, reversed(rests[:-1]), strict=True):
            cost = self.of(item, rest)
            # Items that are repeated any number of times share one text: of k of them, the numbers add up to its
            # length at most.
            shared += cost.once > 0
            ways *= 1 if cost.once else cost.ways
            steps += ways * comb(self.length + shared, shared) * (cost.once or cost.steps)
            if steps > ENDLESS:
                return _ENDLESS
        return _limited(ways * comb(self.length + shared, shared), steps)

    def _repeated(self, repeat: Repeat, after: int) -> _Cost:
        item, begin = repeat.item, _before(repeat.item, 0)
        most = self.length if repeat.most is None else min(repeat.most, self.length)
        least = min(repeat.least, most)
        if most > 1 and item.can_be_empty:
            return _ENDLESS  # nothing, any number of times
        cost = self.of(item, (begin if most > 1 else 0) | after)
        # Each number of times is tried; it is a way, unless the next character tells whether there is one more.
        unsure = item.can_be_empty or bool(begin & after & ~_CROWDED) or bool(after & _CROWDED)
        if cost.ways == 1:
            if unsure:
                return _limited(most - least + 1, (most + 1) * cost.steps, cost.steps if repeat.most is None else 0)
            return _limited(1, (most + 1) * (cost.steps + (0 if after == _END else self.size)))
        if most * cost.ways.bit_length() > 128:
            return _ENDLESS
        ways = sum(cost.ways**count for count in range(most + 1))
        return _limited(ways, ways * cost.steps)


def _limited(ways: int, steps: int, once: int = 0) -> _Cost:
    return _Cost(min(ways, ENDLESS), min(steps, ENDLESS), once)


def _begin(items: Sequence[Item], after: int) -> int:
    """Return the characters that may come next before ``items``, which ``after`` may follow."""
    for item in reversed(items):
        after = _before(item, after)
    return after


def _before(item: Item, rest: int) -> int:
    """Return the characters that may come next before an item, where before what follows it those of ``rest`` may."""
    if isinstance(item, Character):
        return item.among
    if isinstance(item, Place):
        if item.looked_for is not None:
            return ANYTHING | _END | _CROWDED  # to look for it takes more than one step
        # What comes next must fit the place too; and where the expression ends with it, it can still fail.
        fitting = item.before if rest & _END else rest & item.before
        return fitting | rest & _CROWDED
    if isinstance(item, Repeat):
        simple = isinstance(item.item, Character)
        inner = _before(item.item, rest)
        return (inner | rest | (0 if simple else _CROWDED)) if item.can_be_empty else inner
    result = _CROWDED if item.can_be_empty else 0
    for branch in item.branches:
        result |= _begin(branch, rest)
    return result


def _size(item: Item) -> int:
    if isinstance(item, Choice):
        return 1 + sum(_size(each) for branch in item.branches for each in branch)
    if isinstance(item, Repeat):
        return 1 + _size(item.item)
    return 1 if isinstance(item, Character) or item.looked_for is None else 1 + _size(item.looked_for)
