"""Make and check a federation's keys: its authority, the server's certificate, a key pair and a secret per site.

All keys are ECDSA on the curve P-384. The authority signs only the server's certificate: a site is identified by its
public key, which the operator registers. The package cryptography comes with the extra `flower`; it is imported on use.
"""

from __future__ import annotations

import datetime
import ipaddress
import secrets
from typing import TYPE_CHECKING, NamedTuple

from ..errors import InputError
from .settings import check_host

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

AUTHORITY_DAYS, SERVER_DAYS = 3650, 730
SECRET_BYTES = 32


class SiteKeys(NamedTuple):
    """The key pair and the secret of one site."""

    private: bytes  # OpenSSH, as flower-supernode reads it
    public: bytes  # OpenSSH, as `flwr supernode register` reads it
    pem: str  # the public key as the SuperLink reports it
    secret: bytes  # shared only with the server, for the authentication codes of orders and replies


class Certificate(NamedTuple):
    """A certificate and its private key, in the form PEM."""

    certificate: bytes
    key: bytes


def check() -> None:
    """Raise InputError if the package cryptography is not installed."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise InputError(
            "A federation's keys need the package cryptography. Install it with `pip install 'fedabml[flower]'`."
        ) from error


def make_authority(name: str) -> Certificate:
    """Make the federation's own certificate authority, valid for ten years."""
    check()
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    key = _new_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} authority"[:64])])
    builder = _builder(subject, subject, key, AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return _signed(builder.add_extension(_usage(authority=True), critical=True), key, key)


def make_server_certificate(authority: Certificate, host: str) -> Certificate:
    """Make a key and a certificate for `host`, localhost and the loopback addresses, valid for two years."""
    check()
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    issuer = read_certificate(authority.certificate, "The authority's certificate")
    try:
        signer = load_pem_private_key(authority.key, None)
    except (ValueError, TypeError) as error:
        raise InputError("The authority's key cannot be read. Restore secrets/ca.key from a backup.") from error
    if not isinstance(signer, ec.EllipticCurvePrivateKey) or signer.public_key() != issuer.public_key():
        raise InputError("The authority's key does not belong to its certificate. Restore both from one backup.")
    key = _new_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, check_host(host)[:64])])
    builder = _builder(subject, issuer.subject, key, min(SERVER_DAYS, _days_left(issuer)))
    names = [_general_name(each) for each in dict.fromkeys((check_host(host), "localhost", "127.0.0.1", "::1"))]
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(authority=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return _signed(builder, key, signer)


def make_site_keys() -> SiteKeys:
    """Make a site's key pair and its secret."""
    check()
    from cryptography.hazmat.primitives import serialization as forms

    key = _new_key()
    public = key.public_key().public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH) + b"\n"
    private = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.OpenSSH, forms.NoEncryption())
    return SiteKeys(private, public, public_pem(public), secrets.token_bytes(SECRET_BYTES))


def public_pem(public: bytes) -> str:
    """Return a public key in OpenSSH's form as PEM. Raises InputError unless it is an ECDSA key on P-384."""
    check()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization as forms

    try:
        key = forms.load_ssh_public_key(public)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError("A site's public key is damaged: it is no key in OpenSSH's form.") from error
    return _check_curve(key).public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo).decode()


def check_site_keys(private: bytes, public: bytes) -> None:
    """Raise InputError unless these are the two halves of one key pair."""
    check()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization as forms

    try:
        key = forms.load_ssh_private_key(private, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError("A site's private key is damaged: it is no key in OpenSSH's form.") from error
    half = _check_curve(key.public_key()).public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo)
    if half.decode() != public_pem(public):
        raise InputError("A site's private and public keys do not belong together.")


def read_certificate(content: bytes, subject: str) -> x509.Certificate:
    """Read a certificate in the form PEM. Raises InputError if it is damaged."""
    check()
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(content)
    except ValueError as error:
        raise InputError(f"{subject} is damaged: it is no certificate in the form PEM.") from error


def expires(content: bytes, subject: str) -> datetime.datetime:
    """Return the time at which a certificate expires."""
    return read_certificate(content, subject).not_valid_after_utc


def _new_key() -> ec.EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _check_curve(key: object) -> ec.EllipticCurvePublicKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise InputError("A site's key must be an ECDSA key on the curve P-384.")
    return key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    from cryptography import x509

    start = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    # A site's clock may be behind.
    builder = builder.not_valid_before(start - datetime.timedelta(days=1))
    return builder.not_valid_after(start + datetime.timedelta(days=days))


def _signed(
    builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey
) -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives import serialization as forms

    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
    )
    private = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    return Certificate(builder.sign(signer, hashes.SHA384()).public_bytes(forms.Encoding.PEM), private)


def _usage(authority: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not authority, key_cert_sign=authority, crl_sign=authority, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _general_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _days_left(certificate: x509.Certificate) -> int:
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    if left.days < 1:
        raise InputError("The authority's certificate has expired. Make a new federation with init.")
    return left.days
