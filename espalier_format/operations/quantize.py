"""Quantize a checkpoint: from plain weights, or from EXL3 or Espalier, to Espalier or EXL3."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from espalier_format.checkpoint import open_checkpoint
from espalier_format.container.atomic_file import replace_file
from espalier_format.errors import UsageError
from espalier_format.operations.compressed_tensors_findings import contradictions_in_words
from espalier_format.operations.places import folders, given_path, report_place
from espalier_format.operations.source_manifest import check_against_manifest
from espalier_format.quantize.options import QuantizeOptions
from espalier_format.quantize.presets import even_recipe, preset
from espalier_format.quantize.recipe import Recipe, read_recipe
from espalier_format.quantize.run import quantize_opened
from espalier_format.quantize.sensitivity import read_sensitivity

if TYPE_CHECKING:
    from espalier_format.progress import Progress
    from espalier_format.quantize.report import QuantizeReport


def quantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    *,
    to: Literal["espalier", "exl3"] = "espalier",
    bits: float | None = None,
    recipe: str | Path | None = None,
    preset_name: str | None = None,
    seed: int = 0,
    hessians: str | Path | None = None,
    sensitivity: str | Path | None = None,
    effort: Literal["fast", "exact", "thorough"] = "thorough",
    threads: int | None = None,
    backend: str = "auto",
    resume: bool = False,
    force: bool = False,
    digests: bool = True,
    report: str | Path | None = None,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Quantize the checkpoint folder ``source`` into the folder ``destination``.

    The source holds plain Hugging Face weights, or is EXL3, Espalier or compressed-tensors: those are decoded and
    encoded again. Which modules are quantized, and how, follows from the file ``recipe``, from a preset, or from
    ``bits`` alone. ``bits`` is the average of the output as an Espalier config states it (spec/config.md §8), met
    within 0.005. ``hessians`` is a folder with a file per module, ``sensitivity`` a file with weights for the errors
    of modules. ``effort`` is how thoroughly the trellis is searched (`encoder.effort`): "fast" takes half the time of
    "thorough", for a squared error of grids that is 0.5 to 1.2 % higher, "exact" two thirds for 0.1 to 0.3 %. The
    report says which it was.

    The result is the same, byte for byte, for the same source, options and ``seed``, whatever the number of
    ``threads``, the ``backend`` and the interruptions. The output appears all at once at the end. Until then finished
    modules lie in a hidden folder in the destination, from where ``resume`` goes on; without it, an unfinished output
    is refused unless ``force`` is given. ``report`` is a JSON file to write about every module: a new one, or a regular
    one to replace; links to it are followed.

    Raises:
        UsageError: options that do not go together, a pattern that matches nothing, a budget that cannot be met, or
            an unfinished output of another job; an empty path, or a source on the Hub.
        SourceError: the source cannot be quantized: another quantization, dtype, a NaN or an infinity.
        DigestError: the source has a manifest, and a file of it is missing or of another size.
        IndexMismatchError: the index of plain or compressed-tensors weights names a tensor that no shard holds.
        SchemaError, CodebookError: the recipe or sensitivity file is wrong.
        UnknownSizeError, LossyError, ShapeError, ScaleOverflowError: a module cannot be quantized or kept.
        OutputExistsError, WriteError: the destination or the report is in use, or cannot be written; finished work is
            kept.
        MissingFileError: a file or folder that was named does not exist.
        DependencyError: the back end needs a package that is missing.
    """
    folder, target = folders(source, destination, "to quantize it")
    options = QuantizeOptions(
        to=to,
        bits=bits,
        seed=seed,
        effort=effort,
        hessians=None if hessians is None else given_path(hessians, "the folder of Hessians"),
        threads=threads,
        backend=backend,
        resume=resume,
        force=force,
        digests=digests,
    )
    rules = _recipe(recipe, preset_name, options)
    weights = {} if sensitivity is None else read_sensitivity(given_path(sensitivity, "the sensitivity file"))
    record = None
    if report is not None:
        inputs = [Path(path) for path in (recipe, sensitivity, hessians) if path is not None]
        record = report_place(given_path(report, "the report"), checkpoints=(folder, target), inputs=inputs)
    with open_checkpoint(folder) as checkpoint:
        warnings = (*check_against_manifest(checkpoint.folder), *contradictions_in_words(checkpoint))
        done = quantize_opened(checkpoint, target, rules, options, sensitivity=weights, progress=progress)
        done = replace(done, warnings=(*warnings, *done.warnings))
    if record is not None:
        replace_file(record, (json.dumps(done.to_json(), indent=2) + "\n").encode("ascii"))
    return done


def _recipe(recipe: str | Path | None, preset_name: str | None, options: QuantizeOptions) -> Recipe:
    if recipe is not None and preset_name is not None:
        raise UsageError("--recipe and --preset exclude each other")
    if recipe is not None:
        return read_recipe(given_path(recipe, "the recipe"))
    if preset_name is not None:
        if options.exl3:
            raise UsageError("the presets use grid codebooks, which EXL3 does not have; give --bits or --recipe")
        return preset(preset_name)
    if options.bits is None:
        raise UsageError("give --bits, --preset or --recipe")
    return even_recipe(exl3=options.exl3)
