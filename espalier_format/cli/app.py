"""The commands and their options; what they do is in :mod:`espalier_format.operations`, imported when a command runs.

Imports stand in the commands (PLC0415) so that each command loads only what it needs.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

PROGRAM = "espalier-format"

app = typer.Typer(
    name=PROGRAM,
    help="Inspect, verify, convert, quantize and publish trellis-quantized checkpoints (Espalier and EXL3).",
    epilog="Exit codes: 0 fine, 1 readable but wrong, 2 refused. Errors are one line: error[code]: message.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

Source = Annotated[str, typer.Argument(metavar="SRC", help="Folder of a checkpoint.")]
Anywhere = Annotated[
    str,
    typer.Argument(metavar="SRC", help="Folder, .safetensors file, or repository on the Hub: org/name[@revision]."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead, also for errors.")]


class Target(StrEnum):
    """What ``convert`` writes."""

    ESPALIER = "espalier"
    EXL3 = "exl3"
    HF = "hf"


class SchemaName(StrEnum):
    """The documents that have a JSON Schema."""

    CONFIG = "config"
    MANIFEST = "manifest"


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415

        typer.echo(f"{PROGRAM} {version(PROGRAM)}, format version 1")
        raise typer.Exit


@app.callback()
def common(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    _debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; goes anywhere.")] = False,
) -> None:
    """Take the options that stand before a command; ``--debug`` is read and removed by ``main``."""


@app.command(short_help="Show components, bits per weight, codebooks and sizes.")
def inspect(
    source: Anywhere,
    *,
    as_json: AsJson = False,
    experts: Annotated[bool, typer.Option("--experts", help="Show the expert widths of each layer.")] = False,
) -> int:
    """Show what a checkpoint holds: components, bits per weight, codebooks, expert widths, sizes.

    Reads headers and configs only. SRC may be Espalier, EXL3, compressed-tensors or any safetensors checkpoint, also
    on the Hub: what exists as a path is one (./org/name always), hf://org/name is always a repository.
    """
    from espalier_format.cli.collector import collector_paused  # noqa: PLC0415
    from espalier_format.operations.inspect import inspect_checkpoint  # noqa: PLC0415

    with collector_paused():
        report = inspect_checkpoint(source)
    if as_json:
        from espalier_format.cli.terminal import print_json  # noqa: PLC0415

        print_json(report.to_json())
    else:
        from espalier_format.cli.render_inspect import render_inspect  # noqa: PLC0415

        render_inspect(report, experts=experts)
    return 0


@app.command(short_help="Check structure, scales, hashes and decode digests.")
def verify(
    source: Anywhere,
    *,
    as_json: AsJson = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Decode every module and compare its digest with the manifest.")
    ] = False,
    record: Annotated[
        bool, typer.Option("--record", help="With --deep: add the digests to the manifest that has none.")
    ] = False,
    remote: Annotated[
        bool, typer.Option("--remote", help="SRC is a repository: compare it with the Hub's records, download nothing.")
    ] = False,
    public_key: Annotated[
        Path | None, typer.Option("--public-key", metavar="PEM", help="Check the signature with this key, too.")
    ] = None,
    certificate_chain: Annotated[
        list[Path] | None,
        typer.Option("--certificate-chain", metavar="PEM", help="Or with these trusted certificates; may be repeated."),
    ] = None,
) -> int:
    """Check a checkpoint: structure, index, bits, scales, and every size and hash of its manifest.

    All findings are listed. Exit code 1 if the checkpoint is readable but wrong, 2 if it had to be refused.
    """
    from espalier_format.cli.progress import open_progress  # noqa: PLC0415
    from espalier_format.operations.verify_source import verify_source  # noqa: PLC0415

    trusted = None
    if public_key is not None or certificate_chain:
        from espalier_format.hub.signing import TrustedKey  # noqa: PLC0415

        trusted = TrustedKey(public_key, tuple(certificate_chain or ()))
    with open_progress() as progress:
        report = verify_source(source, remote=remote, deep=deep, record=record, trusted=trusted, progress=progress)
    if as_json:
        from espalier_format.cli.terminal import print_json  # noqa: PLC0415

        print_json(report.to_json())
    else:
        from espalier_format.cli.render_verify import render_verify  # noqa: PLC0415

        render_verify(report)
    return report.exit_code


@app.command(short_help="Convert EXL3 to Espalier and back, or to plain weights.")
def convert(
    source: Source,
    destination: Annotated[str, typer.Argument(metavar="DST", help="Folder to write; new or empty.")],
    *,
    to: Annotated[Target, typer.Option("--to", help="espalier and exl3 lose no bit; hf writes plain weights.")],
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="[source|bfloat16|float16|float32]",
            help="For --to hf: dtype of the weights; source, the default, is what config.json states. bf16, fp16 and "
            "fp32 are taken as well.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the unfinished output in DST, if any.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace DST if this program wrote all its files, finished or not; README.md stays."
        ),
    ] = False,
    digests: Annotated[
        bool, typer.Option("--digests", help="For --to espalier: add decode digests to the manifest.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Convert a checkpoint: EXL3 to Espalier and back without losing a bit, or to Hugging Face weights.

    From compressed-tensors only --to hf is possible; each weight then has the dtype of its scale by default.

    DST gets a manifest with the size and SHA-256 of every file, and looks complete only when it is. Where SRC has a
    manifest, presence and sizes of its files are checked; whether their content is right, verify checks.

    Finished files are kept in a hidden folder in DST until the output is complete: after an interruption, the same
    command with --resume goes on.
    """
    from espalier_format.cli.progress import open_progress  # noqa: PLC0415
    from espalier_format.codec.dtype_names import parse_choice  # noqa: PLC0415
    from espalier_format.operations.convert import convert_checkpoint  # noqa: PLC0415

    with open_progress() as progress:
        report = convert_checkpoint(
            source,
            destination,
            to=to.value,
            dtype=None if dtype is None else parse_choice(dtype),
            force=force,
            digests=digests,
            resume=resume,
            progress=progress,
        )
    if as_json:
        from espalier_format.cli.terminal import print_json  # noqa: PLC0415

        print_json(report.to_json())
    else:
        from espalier_format.cli.render_convert import render_convert  # noqa: PLC0415

        render_convert(report)
    return 0


@app.command(short_help="Print a JSON Schema.")
def schema(
    document: Annotated[SchemaName, typer.Argument(metavar="DOCUMENT", help="config or manifest.")] = SchemaName.CONFIG,
) -> int:
    """Print the JSON Schema of quantization_config (config) or of the manifest."""
    from espalier_format.spec import CONFIG_SCHEMA, MANIFEST_SCHEMA, read_text  # noqa: PLC0415

    names = {SchemaName.CONFIG: CONFIG_SCHEMA, SchemaName.MANIFEST: MANIFEST_SCHEMA}
    typer.echo(read_text(names[document]), nl=False)
    return 0


@app.command(short_help="See a real checkpoint go there and back, bit for bit.")
def demo(
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="DIR", help="Write the checkpoints there and keep them.")
    ] = None,
) -> int:
    """Convert a small real EXL3 checkpoint there and back, and show that every byte is the same."""
    from espalier_format.cli.render_demo import render_demo  # noqa: PLC0415
    from espalier_format.operations.demo import run_demo  # noqa: PLC0415

    return render_demo(run_demo(keep), keep)
