"""Apply a recipe to the linear modules of a source: which are quantized, with which candidates and rotation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from espalier_format.checkpoint.components import NOT_DECODER
from espalier_format.checkpoint.tensors import FLOATING
from espalier_format.codec.casting import FLOAT_DTYPES
from espalier_format.codec.rotation import EXL3_BLOCK, padded
from espalier_format.encoder.regularise import default_block
from espalier_format.errors import DtypeError, LossyError, ShapeError, SourceError, UnknownSizeError, UsageError
from espalier_format.quantize.exl3_rules import exl3_group
from espalier_format.quantize.recipe import compile_pattern

if TYPE_CHECKING:
    from collections.abc import Mapping
    from fractions import Fraction

    from espalier_format.codec.codebook import Codebook
    from espalier_format.quantize.linear import Linear
    from espalier_format.quantize.recipe import Recipe, Rule

_SHOWN: Final = 60


@dataclass(frozen=True, slots=True, eq=False)
class ModulePlan:
    """A module to quantize. ``candidates`` are sorted by width; modules of one ``group`` get the same one.

    ``rule`` is the number of the rule in the recipe, and ``average`` what the rule says.
    """

    linear: Linear
    rotation: tuple[int, int]
    candidates: tuple[Codebook, ...]
    group: str
    rule: int
    average: Fraction | None

    @property
    def name(self) -> str:
        """Name of the module."""
        return self.linear.name

    @property
    def padded_in(self) -> int:
        """Stored input size."""
        return padded(self.linear.in_features, self.rotation[0])

    @property
    def padded_out(self) -> int:
        """Stored output size."""
        return padded(self.linear.out_features, self.rotation[1])

    @property
    def in_decoder(self) -> bool:
        """Whether the module counts for ``bits``."""
        return self.linear.component not in NOT_DECODER

    def cost(self, codebook: Codebook) -> int:
        """Return the size of the trellis in half bits."""
        return codebook.half_steps * self.padded_in * self.padded_out


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What happens to each linear module; ``exl3`` says that the output is EXL3."""

    recipe: Recipe
    modules: tuple[ModulePlan, ...]
    kept: tuple[Linear, ...]
    exl3: bool


def make_plan(linears: Mapping[str, Linear], recipe: Recipe, *, exl3: bool) -> Plan:
    """Return the plan.

    Raises:
        UsageError: a pattern or rule matches nothing, nothing at all is quantized, or the rules ask for what EXL3
            cannot hold.
        SourceError: a module to quantize has a dtype that is not floating-point, or a shard disagrees.
        ShapeError, DtypeError: a module to quantize is empty, or its bias is not floating-point.
        UnknownSizeError: the true size of a module to quantize is not known.
        LossyError: a module that is quantized already is kept, and EXL3 cannot hold it.
    """
    _refuse_idle_patterns(linears, recipe)
    modules: list[ModulePlan] = []
    kept: list[Linear] = []
    for linear in linears.values():
        found = recipe.rule_for(linear.name)
        if found is None or not found[1].codebooks or linear.fixed:
            if exl3:
                _refuse_unkeepable(linear)
            kept.append(linear)
            continue
        number, rule = found
        _refuse_unquantizable(linear)
        modules.append(
            ModulePlan(
                linear,
                _rotation(linear, rule, exl3=exl3),
                _candidates(linear, rule, exl3=exl3),
                exl3_group(linear.name) if exl3 else linear.name,
                number,
                rule.average,
            )
        )
    if not modules:
        raise UsageError(f"the recipe {recipe.name} quantizes no module of this checkpoint")
    if exl3:
        _refuse_divided_groups(modules)
    return Plan(recipe, tuple(modules), tuple(kept), exl3)


def _refuse_idle_patterns(linears: Mapping[str, Linear], recipe: Recipe) -> None:
    for number, rule in enumerate(recipe.rules, 1):
        if not rule.required:
            continue
        for pattern in rule.patterns:
            matcher = compile_pattern(pattern)
            if not any(matcher.fullmatch(name) for name in linears):
                shown = pattern if len(pattern) <= _SHOWN else pattern[:_SHOWN] + "…"
                raise UsageError(f"{recipe.name}: rule {number}: no linear module matches {shown!r}")
        if not any(rule.matches(name) for name in linears):
            raise UsageError(f"{recipe.name}: rule {number} matches no linear module")


def _refuse_unquantizable(linear: Linear) -> None:
    if linear.matrix.dtype not in FLOAT_DTYPES:
        raise SourceError(
            f"a weight of dtype {linear.matrix.dtype} cannot be quantized; BF16, F16 and F32 can", tensor=linear.name
        )
    if linear.bias is not None and linear.bias.dtype not in FLOATING:
        raise DtypeError(
            "a bias must be floating-point", path=linear.bias.shard.path, tensor=linear.bias.name, got=linear.bias.dtype
        )
    if linear.weights == 0:
        raise ShapeError("an empty weight cannot be quantized", tensor=linear.name, got=list(linear.matrix.shape))
    if linear.quantized is not None and linear.quantized.size_source == "padded":
        why = f": {linear.quantized.size_how}" if linear.quantized.size_how else ""
        raise UnknownSizeError(f"its true size is not known, so it cannot be encoded again{why}", tensor=linear.name)


def _refuse_unkeepable(linear: Linear) -> None:
    stored = linear.quantized
    if stored is not None and (stored.codebook.is_grid or tuple(stored.rotation) != (EXL3_BLOCK, EXL3_BLOCK)):
        raise LossyError(
            f"the module is kept, but EXL3 cannot hold {stored.codebook.name} with rotation "
            f"{stored.rotation.in_}/{stored.rotation.out}; a rule must quantize it",
            tensor=linear.name,
        )


def _rotation(linear: Linear, rule: Rule, *, exl3: bool) -> tuple[int, int]:
    sizes = (linear.in_features, linear.out_features)
    if not exl3:
        inputs, outputs = (
            default_block(size) if block is None else block for size, block in zip(sizes, rule.rotation, strict=True)
        )
        return inputs, outputs
    if not {*rule.rotation} <= {None, EXL3_BLOCK}:
        raise UsageError(f"EXL3 rotates in blocks of {EXL3_BLOCK} only", tensor=linear.name, got=rule.rotation)
    return EXL3_BLOCK, EXL3_BLOCK


def _candidates(linear: Linear, rule: Rule, *, exl3: bool) -> tuple[Codebook, ...]:
    grids = [codebook.name for codebook in rule.codebooks if codebook.is_grid]
    if exl3 and grids:
        raise UsageError(
            "EXL3 has no grid codebooks; name codebooks such as exl3-mul1@2", tensor=linear.name, got=grids[0]
        )
    return rule.codebooks


def _refuse_divided_groups(modules: list[ModulePlan]) -> None:
    first: dict[str, ModulePlan] = {}
    for module in modules:
        other = first.setdefault(module.group, module)
        if (other.candidates, other.average) != (module.candidates, module.average):
            raise UsageError(
                f"exllamav3 needs {other.name} and {module.name} in one codebook, but the rules divide them",
                tensor=module.name,
            )
