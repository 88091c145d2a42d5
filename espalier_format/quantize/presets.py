"""The built-in recipes.

``espalier`` follows the layout of the published Espalier checkpoint: routed experts at 1, 2 or 3 bits, 2.0 on
average, attention, linear attention and shared expert at 4, the head at 6, the routed experts of MTP at 3,
everything else plain. Dense MLPs, which that model has none of, are treated like its routed experts.

``even`` is what a total of ``--bits`` gets without a recipe: every decoder matrix may get every width.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Final

from espalier_format.checkpoint.components import Component
from espalier_format.codec.codebook import CODEBOOKS, Codebook, get_codebook
from espalier_format.errors import UsageError
from espalier_format.quantize.recipe import Recipe, Rule, sorted_codebooks

PRESETS: Final = ("espalier",)
"""Names that ``--preset`` takes."""

_SMALL: Final = ("*.in_proj_a", "*.in_proj_b", "*.in_proj_ba", "*.f_a_proj", "*.f_b_proj", "*.g_a_proj", "*.g_b_proj")
"""The gates of linear attention: a few rows each, which decide over everything that follows."""

_KEEP: Final = (Rule(components=(Component.VISION, Component.EMBEDDINGS)), Rule(patterns=_SMALL))
_ATTENTION: Final = (Component.ATTENTION, Component.LINEAR_ATTENTION, Component.SHARED_EXPERT)
_FEED_FORWARD: Final = (Component.EXPERTS, Component.MLP)
_EXPERTS_OF_MTP: Final = ("*.experts.*",)


def preset(name: str) -> Recipe:
    """Return a preset by name; UsageError for another name."""
    if name != "espalier":
        raise UsageError("unknown preset", expected=", ".join(PRESETS), got=name)
    experts = sorted_codebooks(get_codebook(book) for book in ("e2m1@1", "e2m1@2", "int5@3"))
    rules = (
        *_KEEP,
        *_mtp_and_head(get_codebook("int5@3"), get_codebook("int8@6")),
        Rule(components=_ATTENTION, codebooks=(get_codebook("int6@4"),)),
        Rule(components=_FEED_FORWARD, codebooks=experts, average=Fraction(2)),
    )
    return Recipe(name, rules)


def even_recipe(*, exl3: bool) -> Recipe:
    """Return the recipe that is used where none is named: for the decoder all grid codebooks, or all of MUL1."""
    books = [book for book in CODEBOOKS.values() if (book.family == "exl3-mul1" if exl3 else book.is_grid)]
    by_width = {book.width: book for book in books}
    rules = (
        *_KEEP,
        *_mtp_and_head(by_width["3"], by_width["6"]),
        Rule(components=(*_ATTENTION, *_FEED_FORWARD), codebooks=sorted_codebooks(books)),
    )
    return Recipe("even", rules)


def _mtp_and_head(experts: Codebook, head: Codebook) -> tuple[Rule, ...]:
    return (
        Rule(patterns=_EXPERTS_OF_MTP, components=(Component.MTP,), codebooks=(experts,)),
        Rule(components=(Component.MTP,)),
        Rule(components=(Component.HEAD,), codebooks=(head,)),
    )
