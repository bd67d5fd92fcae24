"""Keys and certificates: what TLS accepts with them, and what Flower reads."""

import datetime
import socket
import ssl
import sys
import threading

import pytest

from fedabml.errors import InputError
from fedabml.federation import keys

try:
    import cryptography
except ImportError:
    cryptography = None


def needs_cryptography(test):
    """Run a test in Flower's environment, which has the package, and skip it in others."""
    skip = pytest.mark.skipif(cryptography is None, reason="the package cryptography is not installed")
    return pytest.mark.flower(skip(test))


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for make in (lambda: keys.make_authority("a"), keys.make_site_keys, lambda: keys.public_pem(b"")):
        with pytest.raises(InputError, match=r"pip install 'fedabml\[flower\]'"):
            make()


def handshake(tmp_path, authority, certificate, host):
    """Make a TLS connection between two ends of a pair of sockets; return the version that was agreed on."""
    (tmp_path / "ca.crt").write_bytes(authority)
    (tmp_path / "server.crt").write_bytes(certificate.certificate)
    (tmp_path / "server.key").write_bytes(certificate.key)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    client = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    client.verify_flags |= ssl.VERIFY_X509_STRICT  # the default of Python 3.13
    ours, theirs = socket.socketpair()

    def serve():
        try:
            with server.wrap_socket(theirs, server_side=True) as end:
                end.recv(1)
        except OSError:
            pass

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(ours, server_hostname=host) as end:
            return end.version()
    finally:
        ours.close()
        thread.join()
        theirs.close()


@needs_cryptography
@pytest.mark.parametrize("host", ["fed.example.org", "192.0.2.7", "2001:db8::7", "localhost"])
def test_tls_accepts_the_server_by_its_host_and_on_the_loopback_interface(tmp_path, host):
    authority = keys.make_authority("trial")
    certificate = keys.make_server_certificate(authority, host)
    for name in (host, "localhost", "127.0.0.1", "::1"):
        assert handshake(tmp_path, authority.certificate, certificate, name) == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path, authority.certificate, certificate, "other.example.org")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path, keys.make_authority("trial").certificate, certificate, host)


@needs_cryptography
def test_a_servers_certificate_signs_no_other(tmp_path):
    authority = keys.make_authority("trial")
    server = keys.make_server_certificate(authority, "localhost")
    false = keys.make_server_certificate(server, "evil.example.org")
    chained = keys.Certificate(false.certificate + server.certificate, false.key)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path, authority.certificate, chained, "evil.example.org")


@needs_cryptography
def test_certificates_end_in_time():
    now = datetime.datetime.now(datetime.UTC)
    authority = keys.make_authority("trial")
    server = keys.make_server_certificate(authority, "localhost")
    assert 3600 < (keys.expires(authority.certificate, "it") - now).days <= keys.AUTHORITY_DAYS
    assert 700 < (keys.expires(server.certificate, "it") - now).days <= keys.SERVER_DAYS
    with pytest.raises(InputError, match="it is damaged"):
        keys.expires(b"x", "it")


@needs_cryptography
def test_a_key_of_another_authority_is_refused():
    one, other = keys.make_authority("one"), keys.make_authority("other")
    with pytest.raises(InputError, match="does not belong to its certificate"):
        keys.make_server_certificate(keys.Certificate(one.certificate, other.key), "localhost")
    with pytest.raises(InputError, match="cannot be read"):
        keys.make_server_certificate(keys.Certificate(one.certificate, b"x"), "localhost")


@needs_cryptography
def test_site_keys_have_one_public_key_in_both_forms():
    site, other = keys.make_site_keys(), keys.make_site_keys()
    assert site.public.startswith(b"ecdsa-sha2-nistp384 ") and keys.public_pem(site.public) == site.pem
    assert len(site.secret) == keys.SECRET_BYTES and site.secret != other.secret and site.pem != other.pem
    keys.check_site_keys(site.private, site.public)
    with pytest.raises(InputError, match="do not belong together"):
        keys.check_site_keys(site.private, other.public)


@needs_cryptography
@pytest.mark.parametrize("content", [b"", b"x", b"ssh-ed25519 AAAA", b"-----BEGIN OPENSSH PRIVATE KEY-----\n"])
def test_damaged_keys_are_refused(content):
    site = keys.make_site_keys()
    for check in (
        lambda: keys.public_pem(content),
        lambda: keys.check_site_keys(content, site.public),
        lambda: keys.check_site_keys(site.private, content),
    ):
        with pytest.raises(InputError, match="damaged"):
            check()


@needs_cryptography
def test_a_key_on_another_curve_is_refused():
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    with pytest.raises(InputError, match="P-384"):
        keys.public_pem(key.public_key().public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH))


@needs_cryptography
def test_flower_reads_the_keys_and_writes_the_same_pem(tmp_path):
    asymmetric = pytest.importorskip("flwr.supercore.primitives.asymmetric")
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.cli.supernode.register import try_load_public_key

    site = keys.make_site_keys()
    (tmp_path / "site.pub").write_bytes(site.public)
    assert try_load_public_key(tmp_path / "site.pub").decode() == site.pem
    assert asymmetric.public_key_to_bytes(load_ssh_private_key(site.private, None).public_key()).decode() == site.pem
