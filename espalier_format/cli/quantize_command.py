"""The command ``quantize``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from espalier_format.cli.app import AsJson, Source, app


class QuantizeTarget(StrEnum):
    """What ``quantize`` writes."""

    ESPALIER = "espalier"
    EXL3 = "exl3"


class Preset(StrEnum):
    """The built-in recipes."""

    ESPALIER = "espalier"


class SearchEffort(StrEnum):
    """How thoroughly the trellis is searched: `encoder.effort`."""

    FAST = "fast"
    EXACT = "exact"
    THOROUGH = "thorough"


class SearchBackend(StrEnum):
    """The back ends of the encoder; auto is the fastest that works, and never numpy."""

    AUTO = "auto"
    CUDA = "cuda"
    NUMBA = "numba"
    NUMPY = "numpy"


@app.command(short_help="Quantize plain weights, or quantize again, at any average width.")
def quantize(
    source: Source,
    destination: Annotated[str, typer.Argument(metavar="DST", help="Folder to write; new or empty.")],
    *,
    bits: Annotated[
        float | None,
        typer.Option("--bits", help="Average bits per decoder weight, with padding; met within 0.005."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            metavar="FILE",
            help="TOML file of [[rule]]: match, component, codebook, average, rotation, keep.",
        ),
    ] = None,
    preset: Annotated[
        Preset | None,
        typer.Option("--preset", help="Built-in rules; espalier: experts 1 to 3 bits, attention 4, head 6."),
    ] = None,
    to: Annotated[
        QuantizeTarget, typer.Option("--to", help="exl3 follows the rules of exllamav3.")
    ] = QuantizeTarget.ESPALIER,
    seed: Annotated[
        int, typer.Option("--seed", help="Decides the random signs; the config.json of an Espalier output states it.")
    ] = 0,
    hessians: Annotated[
        str | None,
        typer.Option(
            "--hessians",
            metavar="DIR",
            help="Error feedback: folder of <module>.safetensors with hessian (F32, in x in) and count (I64).",
        ),
    ] = None,
    sensitivity: Annotated[
        str | None,
        typer.Option("--sensitivity", metavar="FILE", help="JSON or TOML: module or pattern to weight of its error."),
    ] = None,
    effort: Annotated[
        SearchEffort,
        typer.Option(
            "--effort",
            help="How the trellis is searched: fast takes half the time of thorough, for 1 % more error. Only the "
            "report says which it was.",
        ),
    ] = SearchEffort.THOROUGH,
    backend: Annotated[
        SearchBackend, typer.Option("--backend", help="Where the trellis is searched; never changes the result.")
    ] = SearchBackend.AUTO,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="CPU threads (all if not given); never change the result.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the unfinished output in DST, if any.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace DST if this program wrote all its files, finished or not; README.md stays."
        ),
    ] = False,
    digests: Annotated[
        bool, typer.Option("--digests/--no-digests", help="Put decode digests into the manifest of an Espalier output.")
    ] = True,
    report: Annotated[
        str | None, typer.Option("--report", metavar="FILE", help="Write a JSON report of the error of each module.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Quantize plain weights, or EXL3, Espalier or compressed-tensors, which are decoded and encoded again.

    One of --bits, --recipe and --preset is needed; --bits also goes with the others. Finished modules are kept in a
    hidden folder in DST until the output is complete: after an interruption, the same command with --resume goes on.
    """
    from espalier_format.cli.progress import open_progress  # noqa: PLC0415
    from espalier_format.operations.quantize import quantize_checkpoint  # noqa: PLC0415

    with open_progress() as progress:
        result = quantize_checkpoint(
            source,
            destination,
            to=to.value,
            bits=bits,
            recipe=recipe,
            preset_name=None if preset is None else preset.value,
            seed=seed,
            hessians=hessians,
            sensitivity=sensitivity,
            effort=effort.value,
            backend=backend.value,
            threads=threads,
            resume=resume,
            force=force,
            digests=digests,
            report=report,
            progress=progress,
        )
    if as_json:
        from espalier_format.cli.terminal import print_json  # noqa: PLC0415

        print_json(result.to_json())
    else:
        from espalier_format.cli.render_quantize import render_quantize  # noqa: PLC0415

        render_quantize(result)
    return 0
