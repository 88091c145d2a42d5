"""Codes of a few bits in 32-bit words, in the two layouts that compressed-tensors has written under one name.

* dense: code i stands at bit i x bits of its row's little-endian bit stream, across words where it must;
* word-aligned: 32 // bits codes to a word, the rest of the word unused.

Releases up to 0.17.1 wrote the second, releases from 0.18.0 on write the first; the two are the same for 1, 2, 4 and 8
bits. Nothing in a file names the layout, so it is told by the width of the packed tensor.
"""

from __future__ import annotations

import math
import re
from enum import Enum
from typing import TYPE_CHECKING, Final

from espalier_format.errors import ShapeError, SourceError

if TYPE_CHECKING:
    from pathlib import Path

WORD_BITS: Final = 32
LAST_WORD_ALIGNED: Final = (0, 17, 1)
FIRST_DENSE: Final = (0, 18, 0)

_RELEASE: Final = re.compile(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?(.*)")


class Packing(Enum):
    """How codes lie in words."""

    DENSE = "dense"
    WORD_ALIGNED = "word-aligned"

    def words(self, bits: int, codes: int) -> int:
        """Return how many words ``codes`` codes take."""
        if self is Packing.DENSE:
            return -(-codes * bits // WORD_BITS)
        return -(-codes // (WORD_BITS // bits))

    def period(self, bits: int) -> tuple[int, int]:
        """Return (codes, words) after which the pattern of bits repeats."""
        if self is Packing.WORD_ALIGNED:
            return WORD_BITS // bits, 1
        common = math.gcd(bits, WORD_BITS)
        return WORD_BITS // common, bits // common


def find_packing(
    bits: int, codes: int, words: int, version: str | None, *, tensor: str, path: Path | None = None
) -> Packing:
    """Tell the layout of ``codes`` codes of ``bits`` bits in ``words`` words.

    Where both layouts have that width and differ, the release of compressed-tensors that wrote the file decides.
    ``tensor`` and ``path`` are for messages.

    Raises:
        ShapeError: neither layout has that width.
        SourceError: both have it, and ``version`` does not tell which.
    """
    fitting = [packing for packing in Packing if packing.words(bits, codes) == words]
    if not fitting:
        expected = " or ".join(str(n) for n in sorted({packing.words(bits, codes) for packing in Packing}))
        raise ShapeError(
            f"{codes:,} codes of {bits} bits do not have this width",
            path=path,
            tensor=tensor,
            expected=expected,
            got=words,
        )
    if len(fitting) == 1 or WORD_BITS % bits == 0:
        return fitting[0]
    written = layout_of_release(version)
    if written is not None:
        return written
    raise SourceError(
        f"{codes:,} codes of {bits} bits are as wide in both layouts of compressed-tensors, and the version of the "
        "writer does not tell which it is",
        path=path,
        tensor=tensor,
        got=f"version {version[:40]!a}" if version else "no version",
    )


def layout_of_release(version: str | None) -> Packing | None:
    """Return the layout that a release of compressed-tensors writes; None where the version does not tell."""
    release = _release(version)
    if release is None or LAST_WORD_ALIGNED < release < FIRST_DENSE:
        return None
    return Packing.DENSE if release >= FIRST_DENSE else Packing.WORD_ALIGNED


def _release(version: str | None) -> tuple[int, int, int] | None:
    """Return the release that a version names; None for pre-releases, whose layout cannot be known."""
    match = _RELEASE.fullmatch(version) if version else None
    if match is None:
        return None
    major, minor, patch, rest = match.groups()
    # "0.18.0+cpu" and "0.18.0.post1" are that release; "0.18.0.a20260601" and "0.18.0rc1" come before it.
    if rest and not rest.startswith(("+", ".post")):
        return None
    return int(major), int(minor), int(patch or 0)
