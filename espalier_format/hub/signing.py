"""Sign a manifest, and check its signature, with the model-signing package: local keys or certificates, no network.

The signature covers ``espalier_manifest.json``, and the manifest the size and SHA-256 of every other file: a good
signature over a manifest that all files agree with proves the whole checkpoint (spec/manifest.md).

While it signs or checks, what any thread of the process prints is lost; several threads take turns.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from espalier_format.container.json_document import parse_json
from espalier_format.container.names import MANIFEST_NAME, SIGNATURE_NAME
from espalier_format.container.regular_file import read_regular
from espalier_format.errors import DependencyError, EspalierError, SignatureError, UsageError, WriteError
from espalier_format.hub.process_wide import PROCESS_WIDE
from espalier_format.limits import MAX_JSON_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_SIGNATURE_BYTES: Final = 1024 * 1024
_MAX_KEY_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class SigningKey:
    """Who signs: an elliptic-curve private key in PEM, and for certificates the signer's one and those above it."""

    private_key: Path
    password: bytes | None = None
    certificate: Path | None = None
    chain: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """Whom to trust: the signer's public key in PEM, or the certificates that the signer's one must lead to."""

    public_key: Path | None = None
    certificates: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if (self.public_key is None) == (not self.certificates):
            raise UsageError("a signature is checked with a public key or with certificates: give one of them")


def sign_manifest(folder: Path, key: SigningKey) -> Path:
    """Sign the manifest of a folder; return the path of the signature, which is written or replaced atomically.

    Raises:
        MissingFileError: there is no manifest.
        UsageError: the key or a certificate cannot be read or used, or they do not belong together.
        DependencyError: model-signing is not installed.
        WriteError: the operating system refuses; the old signature, if any, is as before.
    """
    manifest, target = folder / MANIFEST_NAME, folder / SIGNATURE_NAME
    read_regular(manifest, MAX_JSON_BYTES)
    model_signing = _model_signing()
    with _quiet():
        config = model_signing.signing.Config().set_hashing_config(_hashing(model_signing))
        _read_all((key.private_key, key.certificate, *key.chain))
        try:
            if key.certificate is None:
                # The password is annotated as a str, but handed to a function that wants bytes.
                config.use_elliptic_key_signer(private_key=key.private_key, password=cast("Any", key.password))
            else:
                config.use_certificate_signer(
                    private_key=key.private_key, signing_certificate=key.certificate, certificate_chain=key.chain
                )
        except Exception as error:  # cryptography has many kinds, none of which is ours
            raise UsageError(f"the key cannot be used: {_reason(error)}", path=key.private_key) from error
        try:
            with tempfile.TemporaryDirectory(prefix=".espalier-sign-", dir=folder) as scratch:
                signature = Path(scratch) / SIGNATURE_NAME
                config.sign(manifest, signature)
                with signature.open("rb") as file:
                    os.fsync(file.fileno())
                signature.replace(target)
        except OSError as error:
            raise WriteError(f"cannot write: {error.strerror or error}", path=target) from error
    return target


def check_signature(manifest: bytes, signature: bytes, trusted: TrustedKey, path: str | Path) -> None:
    """Check that ``signature`` is one of exactly these bytes of a manifest, by the trusted key.

    A certificate must have been valid when its own validity began: when a signature was made is not recorded.

    Raises:
        SignatureError: it is not; ``path`` names the signature in the message.
        UsageError: the trusted key or certificates cannot be read or used.
        DependencyError: model-signing is not installed.
    """
    model_signing = _model_signing()
    with _quiet(), tempfile.TemporaryDirectory(prefix="espalier-verify-") as scratch:
        config = model_signing.verifying.Config().set_hashing_config(_hashing(model_signing))
        _read_all((trusted.public_key, *trusted.certificates))
        try:
            if trusted.public_key is not None:
                config.use_elliptic_key_verifier(public_key=trusted.public_key)
            else:
                config.use_certificate_verifier(certificate_chain=trusted.certificates)
        except Exception as error:  # as above
            named = trusted.public_key or trusted.certificates[0]
            raise UsageError(f"the key cannot be used: {_reason(error)}", path=named) from error
        _check_form(signature, path)
        signed, beside = Path(scratch) / MANIFEST_NAME, Path(scratch) / SIGNATURE_NAME
        signed.write_bytes(manifest)
        beside.write_bytes(signature)
        try:
            config.verify(signed, beside)
        except Exception as error:
            reason = "the manifest is another one" if "Signature mismatch" in str(error) else _reason(error)
            raise SignatureError(f"is no signature of this manifest by the given key: {reason}", path=path) from error


def _check_form(signature: bytes, path: str | Path) -> None:
    if len(signature) > MAX_SIGNATURE_BYTES:
        raise SignatureError("is too large for a signature", path=path, got=len(signature))
    try:
        parse_json(signature, path=path)
    except EspalierError as error:
        raise SignatureError(f"is no signature: {error.message}", path=path) from error


def _hashing(model_signing: Any) -> Any:
    return model_signing.hashing.Config().use_file_serialization(hashing_algorithm="sha256")


def _model_signing() -> Any:
    try:
        with PROCESS_WIDE, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import model_signing.signing  # noqa: PLC0415 - an optional dependency
            import model_signing.verifying  # noqa: PLC0415
    except ImportError as error:
        raise DependencyError(
            f"signing needs model-signing (missing: {error.name}); install it with: pip install model-signing pyOpenSSL"
        ) from error
    return model_signing


def _read_all(paths: tuple[Path | None, ...]) -> None:
    """Refuse files that are not there before the package sees them: its errors do not name them."""
    for path in paths:
        if path is not None:
            read_regular(path, _MAX_KEY_BYTES)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the deprecation warnings and prints of model-signing and what it uses away from our output.

    Warnings and standard output are the whole process's: one thread at a time, and others had better not print.
    """
    with PROCESS_WIDE, warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
