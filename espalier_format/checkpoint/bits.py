"""Average bits per weight of a checkpoint, exactly (spec/config.md §8)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from espalier_format.checkpoint.components import NOT_DECODER, Component, component_of
from espalier_format.codec.codebook import get_codebook
from espalier_format.codec.rotation import padded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from espalier_format.schema.config import ModuleSpec
    from espalier_format.schema.expert_bank import ExpertBank, Projection

DECIMALS: Final = 6
"""``bits`` and ``head_bits`` are the exact quotient, rounded to this many decimals (to even when half-way)."""


@dataclass(frozen=True, slots=True)
class AverageBits:
    """``bits`` and ``head_bits`` as a config states them; ``bits`` is 0.0 when the decoder has no quantized module."""

    bits: float
    head_bits: float | None


def average_bits(modules: Mapping[str, ModuleSpec], expert_banks: Mapping[str, ExpertBank]) -> AverageBits:
    """Return what a config with these modules and banks must state: trellis bits with padding per true weight."""
    return _average(_of_config(modules, expert_banks))


def _of_config(
    modules: Mapping[str, ModuleSpec], expert_banks: Mapping[str, ExpertBank]
) -> Iterator[tuple[str, int, int]]:
    """Yield (name, half bits of the trellis, weights) per module, or per projection of a bank and codebook."""
    for name, module in modules.items():
        half_steps = get_codebook(module.codebook).half_steps
        yield name, half_steps * _stored(module), module.in_features * module.out_features
    for bank_name, bank in expert_banks.items():
        for projection_name, projection in bank.projections.items():
            # The number of an expert does not change its component, so 0 stands for all of them.
            name = f"{bank_name}.0.{projection_name}"
            for codebook, count in projection.experts_per_codebook().items():
                half_steps = get_codebook(codebook).half_steps
                weights = projection.in_features * projection.out_features
                yield name, count * half_steps * _stored(projection), count * weights


def _stored(sizes: ModuleSpec | Projection) -> int:
    return padded(sizes.in_features, sizes.rotation.in_) * padded(sizes.out_features, sizes.rotation.out)


def _average(entries: Iterable[tuple[str, int, int]]) -> AverageBits:
    decoder_half_bits = decoder_weights = head_half_bits = head_weights = 0
    for name, half_bits, weights in entries:
        component = component_of(name)
        if component is Component.HEAD:
            head_half_bits += half_bits
            head_weights += weights
        elif component not in NOT_DECODER:
            decoder_half_bits += half_bits
            decoder_weights += weights
    return AverageBits(
        bits=_rounded(decoder_half_bits, decoder_weights) if decoder_weights else 0.0,
        head_bits=_rounded(head_half_bits, head_weights) if head_weights else None,
    )


def _rounded(half_bits: int, weights: int) -> float:
    return float(round(Fraction(half_bits, 2 * weights), DECIMALS))
