"""Why bits per weight can be more than the codebook's: the trellis is stored with padding, and all of it counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier_format.checkpoint.components import component_of
from espalier_format.codec.codebook import get_codebook

if TYPE_CHECKING:
    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.checkpoint.module import QuantizedModule
    from espalier_format.operations.inspect_report import ComponentReport


def padding_note(checkpoint: Checkpoint, components: tuple[ComponentReport, ...]) -> str | None:
    """Return one line about the first module that is stored with padding, in each component that has one, or None.

    Modules are looked at only in components whose sums say that one of theirs is padded.
    """
    if checkpoint.packed:  # integers in words, which pad a row by less than a word
        return None
    padded = {
        component.name
        for component in components
        for part in component.storage
        if part.quantized and 16 * part.code_bytes != get_codebook(part.name).half_steps * part.weights
    }
    shown: list[str] = []
    for name in checkpoint.modules:
        component = component_of(name).value
        if component in padded:
            described = _described(checkpoint.modules[name])
            if described is not None:
                padded.remove(component)
                shown.append(described)
        if not padded:
            break
    return f"bits count stored padding: {'; '.join(shown)}" if shown else None


def _described(module: QuantizedModule) -> str | None:
    inputs = f"{module.padded_in:,} inputs for {module.in_features:,}"
    outputs = f"{module.padded_out:,} outputs for {module.out_features:,}"
    sides = [
        text
        for text, is_padded in (
            (inputs, module.padded_in != module.in_features),
            (outputs, module.padded_out != module.out_features),
        )
        if is_padded
    ]
    return f"{module.name} is stored as {' and '.join(sides)}" if sides else None
