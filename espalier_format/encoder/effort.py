"""How thoroughly rings are searched: what a search gives up for speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from espalier_format.errors import UsageError

_FEWEST_PASSES: Final = 2


@dataclass(frozen=True, slots=True)
class Effort:
    """What a trellis search does for each ring; `numpy_backend` says what the passes are.

    Raises UsageError for fewer than two passes and for values of other types.
    """

    passes: int
    """Passes over a ring, the free one counted: at least 2."""
    short: bool = False
    """Whether the free pass sees only the half of the ring around its boundary, 64 positions on either side."""

    def __post_init__(self) -> None:
        """Raise UsageError as the class says."""
        if type(self.passes) is not int or type(self.short) is not bool:
            raise UsageError("an effort is a whole number of passes, and whether the first is short", got=repr(self))
        if self.passes < _FEWEST_PASSES:
            raise UsageError("it takes at least two passes", got=self.passes)

    def reach(self, ring: int) -> int:
        """Return how many positions the free pass sees on either side of its boundary, of a ring of so many."""
        return ring // 4 if self.short else ring // 2


FAST: Final = Effort(2, short=True)
"""Three quarters of the time of `EXACT`; the squared error of grids is 0.4 to 0.9 % higher."""
EXACT: Final = Effort(2)
"""The exact search: optimal for the boundary that a pass over the whole ring finds."""
THOROUGH: Final = Effort(3)
"""Half as long again as `EXACT`; the squared error of grids is 0.1 to 0.3 % lower."""

EFFORTS: Final[Mapping[str, Effort]] = MappingProxyType({"fast": FAST, "exact": EXACT, "thorough": THOROUGH})
"""The efforts that have names."""


def get_effort(name: str) -> Effort:
    """Return the effort of a name. Raises UsageError for an unknown one, or what is no name."""
    given: Any = name  # whatever the annotation says
    if not isinstance(given, str) or given not in EFFORTS:
        raise UsageError("unknown effort", expected=list(EFFORTS), got=str(given))
    return EFFORTS[name]
