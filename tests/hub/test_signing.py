"""Signatures: made and checked by model-signing with keys and certificates made here; no network is used."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hub.hub_server import HubServer

from espalier_format.errors import DependencyError, MissingFileError, SignatureError, UsageError
from espalier_format.hub.address import HubAddress
from espalier_format.hub.client import HubClient
from espalier_format.hub.remote_verify import verify_remote
from espalier_format.hub.signing import SigningKey, TrustedKey, check_signature, sign_manifest
from espalier_format.operations.verify import verify_checkpoint

MANIFEST = "espalier_manifest.json"
SIGNATURE = "espalier_manifest.json.sig"
PASSWORD = b"only a test"


@dataclass(frozen=True)
class Keys:
    private: Path
    encrypted: Path
    public: Path
    other: Path
    certificate: Path
    root: Path
    other_root: Path


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """A key, the same encrypted, another one, a certificate for it, the root that issued that, and another root."""
    pytest.importorskip("model_signing", reason="the extra [sign] is not installed")
    pytest.importorskip("OpenSSL", reason="the extra [sign] is not installed")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    folder = tmp_path_factory.mktemp("keys")
    pem, no_password = serialization.Encoding.PEM, serialization.NoEncryption()
    pkcs8 = serialization.PrivateFormat.PKCS8

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def certify(subject: str, key: ec.EllipticCurvePrivateKey, issuer: str, by: ec.EllipticCurvePrivateKey) -> bytes:
        now = dt.datetime.now(dt.UTC)
        is_root = subject == issuer
        builder = (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name(issuer))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1 + is_root))
            .not_valid_after(now + dt.timedelta(days=30))
            .add_extension(x509.BasicConstraints(ca=is_root, path_length=None), critical=True)
            .add_extension(
                x509.KeyUsage(
                    digital_signature=not is_root,
                    key_cert_sign=is_root,
                    crl_sign=is_root,
                    content_commitment=False,
                    key_encipherment=False,
                    data_encipherment=False,
                    key_agreement=False,
                    encipher_only=False,
                    decipher_only=False,
                ),
                critical=True,
            )
        )
        return builder.sign(by, hashes.SHA256()).public_bytes(pem)

    def write(file: str, data: bytes) -> Path:
        (folder / file).write_bytes(data)
        return folder / file

    signer, other, root, other_root = (ec.generate_private_key(ec.SECP256R1()) for _ in range(4))
    public = serialization.PublicFormat.SubjectPublicKeyInfo
    return Keys(
        private=write("private.pem", signer.private_bytes(pem, pkcs8, no_password)),
        encrypted=write(
            "encrypted.pem", signer.private_bytes(pem, pkcs8, serialization.BestAvailableEncryption(PASSWORD))
        ),
        public=write("public.pem", signer.public_key().public_bytes(pem, public)),
        other=write("other.pem", other.public_key().public_bytes(pem, public)),
        certificate=write("certificate.pem", certify("signer", signer, "root", root)),
        root=write("root.pem", certify("root", root, "root", root)),
        other_root=write("other_root.pem", certify("root", other_root, "root", other_root)),
    )


def check(folder: Path, trusted: TrustedKey) -> None:
    check_signature((folder / MANIFEST).read_bytes(), (folder / SIGNATURE).read_bytes(), trusted, SIGNATURE)


def test_key(espalier: Path, keys: Keys) -> None:
    before = sorted(path.name for path in espalier.iterdir())
    assert sign_manifest(espalier, SigningKey(keys.private)) == espalier / SIGNATURE
    check(espalier, TrustedKey(keys.public))
    assert sorted(path.name for path in espalier.iterdir()) == sorted([*before, SIGNATURE])
    with pytest.raises(SignatureError, match="no signature of this manifest by the given key"):
        check(espalier, TrustedKey(keys.other))


def test_encrypted_key(espalier: Path, keys: Keys) -> None:
    sign_manifest(espalier, SigningKey(keys.encrypted, PASSWORD))
    check(espalier, TrustedKey(keys.public))
    for wrong in (None, b"wrong"):
        with pytest.raises(UsageError, match="cannot be used"):
            sign_manifest(espalier, SigningKey(keys.encrypted, wrong))
    check(espalier, TrustedKey(keys.public))


def test_certificate(espalier: Path, keys: Keys) -> None:
    sign_manifest(espalier, SigningKey(keys.private, certificate=keys.certificate, chain=(keys.root,)))
    check(espalier, TrustedKey(certificates=(keys.root,)))
    for trusted in (TrustedKey(certificates=(keys.other_root,)), TrustedKey(keys.public)):
        with pytest.raises(SignatureError):
            check(espalier, trusted)


@pytest.mark.parametrize("at", [0, 1000, -2])
def test_changed_manifest(at: int, espalier: Path, keys: Keys) -> None:
    sign_manifest(espalier, SigningKey(keys.private))
    data = bytearray((espalier / MANIFEST).read_bytes())
    data[at] ^= 1
    (espalier / MANIFEST).write_bytes(data)
    with pytest.raises(SignatureError, match="the manifest is another one"):
        check(espalier, TrustedKey(keys.public))


@pytest.mark.parametrize(
    "signature",
    [b"", b"{}", b"[]", b"null", b"not json", b"[" * 100_000, b'"' + b"x" * 2_000_000 + b'"', b'{"mediaType": 3}'],
)
def test_signature_of_another_form(signature: bytes, espalier: Path, keys: Keys) -> None:
    with pytest.raises(SignatureError):
        check_signature((espalier / MANIFEST).read_bytes(), signature, TrustedKey(keys.public), SIGNATURE)


def test_every_changed_byte_of_the_signature_counts(espalier: Path, keys: Keys) -> None:
    """Of the payload and the signature proper, a sample; not every byte of the envelope carries meaning."""
    sign_manifest(espalier, SigningKey(keys.private))
    document = json.loads((espalier / SIGNATURE).read_bytes())
    for holder, key in ((document["dsseEnvelope"], "payload"), (document["dsseEnvelope"]["signatures"][0], "sig")):
        good = holder[key]
        for at in range(0, len(good) - 4, max(1, len(good) // 12)):
            holder[key] = good[:at] + ("A" if good[at] != "A" else "B") + good[at + 1 :]
            with pytest.raises(SignatureError):
                check_signature(
                    (espalier / MANIFEST).read_bytes(),
                    json.dumps(document).encode(),
                    TrustedKey(keys.public),
                    SIGNATURE,
                )
        holder[key] = good


def test_signature_is_one_that_model_signing_checks(espalier: Path, keys: Keys) -> None:
    """Anybody can check it without this package."""
    sign_manifest(espalier, SigningKey(keys.private))
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(espalier / MANIFEST)]
    more = ["--signature", str(espalier / SIGNATURE), "--public_key", str(keys.public)]
    result = subprocess.run([*command, *more], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_recorded_digests_end_the_signature(espalier: Path, keys: Keys) -> None:
    document = json.loads((espalier / MANIFEST).read_bytes())
    del document["decode_digests"]
    (espalier / MANIFEST).write_text(json.dumps(document), encoding="ascii")
    sign_manifest(espalier, SigningKey(keys.private))
    report = verify_checkpoint(espalier, deep=True, record=True)
    assert report.recorded == 15
    assert "sign it again" in report.warnings[-1]
    assert not (espalier / SIGNATURE).exists()


def test_unusable_keys(espalier: Path, keys: Keys, tmp_path: Path) -> None:
    (tmp_path / "text.pem").write_text("no key", encoding="ascii")
    for bad in (keys.public, tmp_path / "text.pem"):
        with pytest.raises(UsageError, match="cannot be used"):
            sign_manifest(espalier, SigningKey(bad))
    with pytest.raises(MissingFileError):
        sign_manifest(espalier, SigningKey(tmp_path / "none.pem"))
    with pytest.raises(UsageError, match="cannot be used"):
        check_signature(b"{}", b"{}", TrustedKey(tmp_path / "text.pem"), SIGNATURE)
    with pytest.raises(UsageError, match="give one of them"):
        TrustedKey()
    (espalier / MANIFEST).unlink()
    with pytest.raises(MissingFileError):
        sign_manifest(espalier, SigningKey(keys.private))


def test_without_the_extra(espalier: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "model_signing", None)
    with pytest.raises(DependencyError, match="pip install model-signing pyOpenSSL"):
        sign_manifest(espalier, SigningKey(tmp_path / "none.pem"))


def test_remote_signature(hub: HubServer, client: HubClient, espalier: Path, keys: Keys) -> None:
    """Of a repository only the manifest and its signature are fetched for it."""
    sign_manifest(espalier, SigningKey(keys.private))
    hub.add("org/name", espalier)
    address = HubAddress("org/name")
    report = verify_remote(address, client=client, trusted=TrustedKey(keys.public))
    assert [check.outcome for check in report.checks] == ["passed"] * 5
    assert verify_remote(address, client=client, trusted=TrustedKey(keys.other)).findings[0].code == "signature"
    (espalier / SIGNATURE).unlink()
    hub.add("org/name", espalier)
    (finding,) = verify_remote(address, client=client, trusted=TrustedKey(keys.public)).findings
    assert finding.message == "the manifest is not signed"
