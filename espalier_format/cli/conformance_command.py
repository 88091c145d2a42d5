"""The command ``conformance``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from espalier_format.cli.app import AsJson, app
from espalier_format.errors import UsageError, WriteError

if TYPE_CHECKING:
    from collections.abc import Mapping


class DecoderKind(StrEnum):
    """What a callable does."""

    OPEN = "open"
    VERIFY = "verify"
    CODES = "codes"
    WEIGHTS = "weights"
    LOAD = "load"
    MATMUL = "matmul"
    EXPERTS = "experts"


@app.command(short_help="Prove a decoder of another program, or write the known answers.")
def conformance(
    *,
    decoder: Annotated[
        list[str] | None,
        typer.Option(
            "--decoder",
            metavar="MODULE:FUNCTION",
            help="The callable to try, of the kind --kind; also KIND=MODULE:FUNCTION, or a MODULE with functions named "
            "like kinds; may be repeated.",
        ),
    ] = None,
    kind: Annotated[
        DecoderKind | None,
        typer.Option(
            "--kind",
            help="open, verify: a folder. codes, weights, matmul: tensors. load: a module. experts: a bank of them.",
        ),
    ] = None,
    level: Annotated[
        int | None,
        typer.Option("--level", min=1, max=3, help="Claim: exit code 1 unless levels 1 to N are tested and passed."),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="DEVICE", help="Give torch tensors on it (cpu, cuda), not numpy.")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype",
            metavar="[float32|float16|bfloat16]",
            help="Only this output format; may be repeated. All three if not given. fp32, fp16 and bf16 are taken as "
            "well.",
        ),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Weights must be correctly rounded, not only within tolerance.")
    ] = False,
    exl3: Annotated[
        bool, typer.Option("--exl3", help="Also refusals that only readers of EXL3 and plain checkpoints can give.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PATTERN", help="Only cases of such names (weights/e2m1@*); may be repeated."),
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="PATTERN", help="No cases of such names; may be repeated.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write the report as JSON to a file, too.")
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option("--write", metavar="DIR", help="Write the kit, 47 MB, for a program in another language."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Try a decoder on the known answers of the format, and report by level.

    Level 1 opens checkpoints and refuses bad ones, level 2 decodes codes bit for bit and weights within tolerance,
    level 3 multiplies. Modules of the current folder are found. The decoder runs in a process of its own: one that ends
    it shows nothing. spec/conformance.md says with what each kind is called.
    """
    from espalier_format.codec.dtype_names import parse_dtype  # noqa: PLC0415

    dtypes = tuple(parse_dtype(name) for name in dtype or ())
    if write is not None:
        if decoder or kind or level or report:
            raise UsageError("--write writes the kit and tries nothing: give no decoder with it")
        return _write(write, as_json=as_json)
    if not decoder:
        raise UsageError("give a decoder (--decoder module:function --kind codes), or --write DIR")
    from espalier_format.conformance.apart import Request, run_apart  # noqa: PLC0415
    from espalier_format.conformance.suite import Options  # noqa: PLC0415

    options = Options(
        dtypes=dtypes or Options().dtypes,
        exact=exact,
        readers=("espalier", "exl3", "plain") if exl3 else ("espalier",),
        only=tuple(only or ()),
        skip=tuple(skip or ()),
    )
    result = run_apart(Request(tuple(decoder), None if kind is None else kind.value, level, device, options))
    document = result.to_json()
    if report is not None:
        _save(report, document)
    if as_json:
        from espalier_format.cli.terminal import print_json  # noqa: PLC0415

        print_json(document)
    else:
        from espalier_format.cli.render_conformance import render_conformance  # noqa: PLC0415

        render_conformance(result)
    return result.exit_code


def _write(folder: Path, *, as_json: bool) -> int:
    from espalier_format.conformance.writer import write_kit  # noqa: PLC0415

    written = write_kit(folder)
    if as_json:
        from espalier_format.cli.terminal import print_json  # noqa: PLC0415

        print_json({"folder": str(written.folder), "files": written.files, "bytes": written.size})
    else:
        from espalier_format.cli.render_conformance import render_written  # noqa: PLC0415

        render_written(written)
    return 0


def _save(path: Path, document: Mapping[str, object]) -> None:
    import json  # noqa: PLC0415

    from espalier_format.cli.terminal import JSON_SCHEMA_VERSION  # noqa: PLC0415

    text = json.dumps({"schema_version": JSON_SCHEMA_VERSION, **document}, indent=2, allow_nan=False) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WriteError(f"cannot write the report: {error.strerror or error}", path=path) from error
