"""Everything that can be decided, and refused, before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from espalier_format.checkpoint.files import refuse_single_file
from espalier_format.converters.espalier_block import OutputModule
from espalier_format.converters.exl3_limits import check_names
from espalier_format.converters.exl3_modules import ImportedModule, import_modules
from espalier_format.encoder.backend import load_backend
from espalier_format.encoder.hessian import has_hessian
from espalier_format.errors import MissingFileError
from espalier_format.quantize.allocation import make_pools
from espalier_format.quantize.documents import config_document, copied_files
from espalier_format.quantize.exl3_rules import exl3_warnings, refuse_unscaled
from espalier_format.quantize.inventory import take_inventory
from espalier_format.quantize.layout import check_headers, plan_shards
from espalier_format.quantize.plan import make_plan
from espalier_format.quantize.sensitivity import module_weights

if TYPE_CHECKING:
    from espalier_format.checkpoint.base import Checkpoint
    from espalier_format.codec.codebook import Codebook
    from espalier_format.quantize.allocation import Pool
    from espalier_format.quantize.layout import OutputShard, ReadResult
    from espalier_format.quantize.linear import Linear
    from espalier_format.quantize.options import QuantizeOptions
    from espalier_format.quantize.plan import Plan
    from espalier_format.quantize.recipe import Recipe

_SHOWN: Final = 3


@dataclass(frozen=True, slots=True, eq=False)
class Preparation:
    """The plan, its budgets, the weight of each module's error, what is copied, and warnings for a person.

    ``kept`` are the modules that are quantized already and stay so.
    """

    linears: Mapping[str, Linear]
    plan: Plan
    bits: float | None
    pools: tuple[Pool, ...]
    weights: Mapping[str, float]
    kept: Mapping[str, ImportedModule]
    copied: tuple[str, ...]
    warnings: tuple[str, ...]

    def output_modules(self, chosen: Mapping[str, Codebook]) -> dict[str, OutputModule]:
        """Return the quantized modules of the output, in the order of the source."""
        encoded = self.encoded_modules(chosen)
        modules: dict[str, OutputModule] = {}
        for name in self.linears:
            if name in encoded:
                modules[name] = encoded[name]
            elif name in self.kept:
                modules[name] = self.kept[name].as_output()
        return modules

    def encoded_modules(self, chosen: Mapping[str, Codebook]) -> dict[str, OutputModule]:
        """Return the modules that are encoded anew."""
        return {
            module.name: OutputModule(
                module.name,
                chosen[module.name],
                module.linear.in_features,
                module.linear.out_features,
                module.rotation,
            )
            for module in self.plan.modules
        }

    def shards(self, source: Checkpoint, chosen: Mapping[str, Codebook], read: ReadResult) -> list[OutputShard]:
        """Return the shards of the output."""
        return plan_shards(
            source,
            self.linears.values(),
            self.encoded_modules(chosen),
            self.kept,
            read,
            exl3=self.plan.exl3,
        )

    @property
    def unties(self) -> bool:
        """Whether a head that was tied to the embedding gets tensors of its own."""
        return any(module.linear.tied for module in self.plan.modules)


def prepare(
    source: Checkpoint, recipe: Recipe, options: QuantizeOptions, sensitivity: Mapping[str, float]
) -> Preparation:
    """Decide what is done, and try out whether headers and config.json of the output can be written.

    Raises:
        SourceError: a single file, a source that is quantized in another way, or a weight of another dtype.
        UsageError: a pattern that matches nothing, a budget that cannot be met, options that EXL3 cannot follow, or a
            GPU, asked for by name, that is too small for a codebook.
        DependencyError: the back end needs a package that is missing.
        PathError: with a folder of Hessians, a module whose name leads out of it.
        EspalierError: as `has_hessian`, `take_inventory`, `make_plan`, `make_pools` and `config_document`.
    """
    refuse_single_file(source)
    if options.hessians is not None and not options.hessians.is_dir():
        raise MissingFileError("there is no such folder of Hessians", path=options.hessians)
    linears = take_inventory(source, exl3=options.exl3)
    plan = make_plan(linears, recipe, exl3=options.exl3)
    bits = recipe.bits if options.bits is None else options.bits
    warnings: list[str] = []
    if options.exl3:
        refuse_unscaled(source.config, linears, from_exl3=source.was_exl3)
        warnings.extend(exl3_warnings(plan, source.config))
    kept, kept_warnings = _kept_modules(source, plan)
    copied, left_out = copied_files(source)
    if left_out:
        more = f" and {len(left_out) - _SHOWN} more" if len(left_out) > _SHOWN else ""
        warnings.append(f"not copied, since they hold weights in another form: {', '.join(left_out[:_SHOWN])}{more}")
    preparation = Preparation(
        linears,
        plan,
        bits,
        make_pools(plan, bits),
        module_weights(sensitivity, linears),
        kept,
        copied,
        (*kept_warnings, *warnings, *_hessian_warnings(plan, options.hessians)),
    )
    _try_out(source, preparation, options)
    # Last: what is wrong with the source or the options is told without it too.
    for codebook in {codebook: None for module in plan.modules for codebook in module.candidates}:
        load_backend(options.backend, codebook)
    return preparation


def _kept_modules(source: Checkpoint, plan: Plan) -> tuple[dict[str, ImportedModule], tuple[str, ...]]:
    """Return the modules that stay as they are quantized, with the sizes that the output states."""
    names = {linear.name for linear in plan.kept if linear.quantized is not None}
    if names and source.format == "exl3" and not plan.exl3:
        imported, warnings = import_modules(source)
        return {name: module for name, module in imported.items() if name in names}, warnings
    modules = (source.modules[name] for name in source.modules if name in names)
    return {m.name: ImportedModule(m, m.in_features, m.out_features, m.size_source) for m in modules}, ()


def _hessian_warnings(plan: Plan, folder: Path | None) -> Iterator[str]:
    if folder is None:
        return
    missing = [m.name for m in plan.modules if not has_hessian(folder, m.name, m.linear.in_features)]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        yield f"there is no Hessian of {missing[0]}{more}: encoded without error feedback"


def _try_out(source: Checkpoint, preparation: Preparation, options: QuantizeOptions) -> None:
    """Make everything but the data of an output with the last candidates: what fails there would fail at the end."""
    chosen = {module.name: module.candidates[-1] for module in preparation.plan.modules}
    shards = preparation.shards(source, chosen, lambda _module, _kind: iter(()))
    modules = preparation.output_modules(chosen)
    if options.exl3:
        check_names(source.plain.values(), modules)
    check_headers(shards, exl3=options.exl3)
    config_document(
        source,
        modules,
        shards,
        seed=options.seed,
        exl3=options.exl3,
        unties=preparation.unties,
    )
