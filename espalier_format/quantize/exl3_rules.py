"""What exllamav3 wants of the widths and sizes in an EXL3 checkpoint (spec/exl3.md §6)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from espalier_format.checkpoint.text_sections import text_section
from espalier_format.codec.rotation import EXL3_BLOCK
from espalier_format.converters.hf_architectures import find_baked_scale
from espalier_format.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from espalier_format.quantize.plan import Plan

WIDEST_MLP: Final = 55296
"""exllamav3 cuts an MLP that is wider into slices."""

_PROJECTION: Final = re.compile(r"(?P<parent>.+)\.(?P<projection>[^.]+)")
_BANK: Final = re.compile(r"(?P<bank>(?:.+\.)?experts)\.[0-9]+")
_GATE_AND_UP: Final = {"gate_proj": "gate and up", "up_proj": "gate and up", "w1": "w1 and w3", "w3": "w1 and w3"}


def exl3_group(module: str) -> str:
    """Return the name of the group that must share one codebook: a projection of all experts; gate and up together."""
    match = _PROJECTION.fullmatch(module)
    if match is None:
        return module
    bank = _BANK.fullmatch(match["parent"])
    parent = bank["bank"] if bank else match["parent"]
    projection = _GATE_AND_UP.get(match["projection"], match["projection"])
    return f"{parent}.{projection}"


def refuse_unscaled(config: Mapping[str, Any], modules: Iterable[str], *, from_exl3: bool) -> None:
    """Raise SourceError where exllamav3 would expect a factor in the weights that the source does not have in them."""
    if from_exl3:
        return
    found = find_baked_scale(config, modules)
    if found is not None:
        baked, identity, module = found
        raise SourceError(
            f"exllamav3 expects a scale in the weights of {identity} ({baked.scale}), which is not supported",
            tensor=module,
        )


def exl3_warnings(plan: Plan, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what exllamav3 1.6.5 may not be able to run, or only slowly."""
    return tuple(_size_warnings(config)) + tuple(_group_warnings(plan))


def _size_warnings(config: Mapping[str, Any]) -> Iterator[str]:
    text = text_section(config)
    hidden = text.get("hidden_size")
    if isinstance(hidden, int) and hidden % EXL3_BLOCK:
        yield (
            f"the hidden size {hidden} is no multiple of {EXL3_BLOCK}: exllamav3 1.6.5 does not run a Llama of such a "
            "size; it may not run this model"
        )
    wide = text.get("intermediate_size")
    if isinstance(wide, int) and wide > WIDEST_MLP:
        yield f"the MLP is {wide} wide; exllamav3 cuts one wider than {WIDEST_MLP} into slices, which is not done here"


def _group_warnings(plan: Plan) -> Iterator[str]:
    groups = {module.group for module in plan.modules}
    mixed = [linear.name for linear in plan.kept if exl3_group(linear.name) in groups]
    if mixed:
        more = f" and {len(mixed) - 1} more" if len(mixed) > 1 else ""
        yield f"{mixed[0]}{more} kept, while others of the same projection are quantized: exllamav3 may not load that"
