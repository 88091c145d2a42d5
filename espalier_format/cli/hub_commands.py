"""The commands for the Hub and for signatures: ``upload`` and ``sign``. Imports stand in them as in ``app``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from espalier_format.cli.app import AsJson, app
from espalier_format.errors import UsageError

if TYPE_CHECKING:
    from espalier_format.operations.verify_report import VerifyReport

PASSWORD_VARIABLE = "ESPALIER_KEY_PASSWORD"  # noqa: S105 - the name of a variable

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a checkpoint.")]


class Readme(StrEnum):
    """Whose README.md text is kept."""

    FOLDER = "folder"
    REPOSITORY = "repository"


@app.command(short_help="Publish a checkpoint on the Hub, with its model card.")
def upload(
    folder: Folder,
    repository: Annotated[str, typer.Argument(metavar="org/name", help="Model repository; made if there is none.")],
    *,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="BRANCH", help="Commit to this branch, not to main.")
    ] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of committing.")] = False,
    message: Annotated[str | None, typer.Option("--message", metavar="TEXT", help="Commit message.")] = None,
    base_model: Annotated[
        str | None, typer.Option("--base-model", metavar="org/name", help="For the card: what was quantized.")
    ] = None,
    license_name: Annotated[
        str | None, typer.Option("--license", metavar="ID", help="For the card: the license, as the Hub spells it.")
    ] = None,
    readme: Annotated[
        Readme | None, typer.Option("--readme", help="Whose README.md to keep, where they differ.")
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Delete files that the repository has and the checkpoint does not.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Verify DIR, write its model card, publish it as one commit, and verify the repository.

    What fails the verification is not published. README.md keeps what its author wrote. Running it again sends only
    what is missing. Tokens are found as by the hf command: HF_TOKEN, or `hf auth login`.
    """
    from espalier_format.cli.progress import open_progress  # noqa: PLC0415
    from espalier_format.hub.upload import UploadOptions, upload_checkpoint  # noqa: PLC0415

    options = UploadOptions(
        private=private,
        revision=revision,
        create_pr=create_pr,
        message=message,
        base_model=base_model,
        license=license_name,
        prune=prune,
        readme=None if readme is None else readme.value,
    )
    with open_progress() as progress:
        report = upload_checkpoint(folder, repository, options, progress=progress)
    if as_json:
        from espalier_format.cli.terminal import print_json  # noqa: PLC0415

        print_json(report.to_json())
    else:
        from espalier_format.cli.render_upload import render_upload  # noqa: PLC0415

        render_upload(report)
    return report.exit_code


@app.command(short_help="Sign the manifest of a checkpoint.")
def sign(
    folder: Folder,
    *,
    private_key: Annotated[
        Path, typer.Option("--private-key", metavar="PEM", help="Elliptic-curve private key (P-256, P-384 or P-521).")
    ],
    certificate: Annotated[
        Path | None, typer.Option("--certificate", metavar="PEM", help="The signer's certificate, for that key.")
    ] = None,
    chain: Annotated[
        list[Path] | None,
        typer.Option("--certificate-chain", metavar="PEM", help="Certificates above it; may be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Verify DIR, then sign its manifest with a local key or certificate: espalier_manifest.json.sig.

    The manifest holds the size and SHA-256 of every file, so the signature covers the checkpoint. Needs the extra
    [sign]; no network is used. The password of an encrypted key is read from ESPALIER_KEY_PASSWORD, or asked for.
    """
    from espalier_format.cli.progress import open_progress  # noqa: PLC0415
    from espalier_format.hub.signing import SigningKey, sign_manifest  # noqa: PLC0415
    from espalier_format.operations.verify import verify_checkpoint  # noqa: PLC0415

    if chain and certificate is None:
        raise UsageError("--certificate-chain needs --certificate")
    with open_progress() as progress:
        report = verify_checkpoint(folder, progress=progress)
    if report.findings:
        return _not_signed(report, as_json=as_json)
    key = SigningKey(private_key, _password(private_key), certificate, tuple(chain or ()))
    signature = sign_manifest(folder, key)
    if as_json:
        from espalier_format.cli.terminal import print_json  # noqa: PLC0415

        print_json({"path": str(folder), "signature": str(signature)})
    else:
        from espalier_format.cli.terminal import safe_text  # noqa: PLC0415

        typer.echo(safe_text(f"signed: {signature}"))
    return 0


def _not_signed(report: VerifyReport, *, as_json: bool) -> int:
    from espalier_format.cli.render_verify import render_verify  # noqa: PLC0415
    from espalier_format.cli.terminal import print_json  # noqa: PLC0415

    if as_json:
        print_json(report.to_json())
    else:
        render_verify(report)
        typer.echo("not signed", err=True)
    return report.exit_code


def _password(private_key: Path) -> bytes | None:
    """Return the password of an encrypted PEM key: from the environment, or asked for at a terminal."""
    import os  # noqa: PLC0415
    import sys  # noqa: PLC0415

    from espalier_format.container.regular_file import read_regular  # noqa: PLC0415

    if b"ENCRYPTED" not in read_regular(private_key, 1024 * 1024):
        return None
    given = os.environ.get(PASSWORD_VARIABLE)
    if given is None and sys.stdin.isatty():
        given = typer.prompt("password of the private key", hide_input=True, err=True)
    if given is None:
        raise UsageError(f"the private key is encrypted; set {PASSWORD_VARIABLE}", path=private_key)
    return given.encode()
