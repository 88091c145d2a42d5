"""Plain weights beside quantized ones: they are allowed (spec/espalier-v1.md §5), and nobody reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from espalier_format.container.header import TensorInfo

_SUFFIX: Final = ".weight"
_SHOWN: Final = 3


def copy_warnings(plain: Iterable[str], modules: Container[str], infos: Mapping[str, TensorInfo]) -> tuple[str, ...]:
    """Return at most one warning, which counts the plain weights of ``modules`` and shows the first few.

    ``plain`` are the tensors that belong to no module, ``infos`` all tensors.
    """
    found = [name for name in plain if name.endswith(_SUFFIX) and name[: -len(_SUFFIX)] in modules]
    if not found:
        return ()
    n_bytes = sum(infos[name].nbytes for name in found)
    more = f" and {len(found) - _SHOWN:,} more" if len(found) > _SHOWN else ""
    what = "plain weights of modules that are quantized; their values are not used"
    return (f"{', '.join(found[:_SHOWN])}{more}, {n_bytes:,} bytes: {what}",)
