"""A small certificate authority for development, private clusters and tests. Needs the extra `certs`."""

from __future__ import annotations

import datetime
import ipaddress
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.errors import ConfigError
from baton.security.matrix import CERTIFICATE_ROLES, CallerRole, certificate_name

_SKEW = datetime.timedelta(hours=1)
"""Certificates are valid from this long before now, since the clocks of two machines may differ."""
_AUTHORITY_DAYS = 3650
_SERVERS = (CallerRole.ROUTER, CallerRole.NODE)


def make_certificates(
    directory: Path, cluster: str, hosts: Sequence[str], days: int, now: datetime.datetime
) -> Sequence[Path]:
    """Make an authority in `directory`, unless it has one, and a new certificate for each role. Returns the new files.

    `hosts`: names and addresses by which clients reach the servers. Only the owner can read the keys. Raises
    ConfigError if the directory can't be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        made: list[Path] = []
        if (directory / "ca.crt").exists() or (directory / "ca.key").exists():
            authority = _read_authority(directory)
        else:
            authority = _new_authority(cluster, now)
            made += _write_pair(directory, "ca", *authority)
        for role in CERTIFICATE_ROLES:
            names = hosts if role in _SERVERS else ()
            made += _write_pair(directory, role.value, *_issue(authority, role, cluster, names, days, now))
        return made
    except OSError as error:
        raise ConfigError(f"{directory} can't be written ({error.strerror}): name another directory") from None


_Pair = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


def _new_authority(cluster: str, now: datetime.datetime) -> _Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"Baton cluster {cluster}")
    use = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(name, name, key.public_key(), _AUTHORITY_DAYS, now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(use, critical=True)
        .sign(key, hashes.SHA256())
    )
    return certificate, key


def _issue(
    authority: _Pair, role: CallerRole, cluster: str, hosts: Sequence[str], days: int, now: datetime.datetime
) -> _Pair:
    issuer, issuer_key = authority
    key = ec.generate_private_key(ec.SECP256R1())
    own = certificate_name(role, cluster)
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if role in _SERVERS else [])]
    known_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    certificate = (
        _builder(_name(own), issuer.subject, key.public_key(), days, now)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(own), *map(_host, hosts)]), critical=False)
        .add_extension(known_by, critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
    return certificate, key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int, now: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _name(text: str) -> x509.Name:
    # X.520 limits a common name to 64 characters.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise ConfigError(f"host {host[:80]!r} is neither a name in ASCII nor an address") from None


def _read_authority(directory: Path) -> _Pair:
    try:
        certificate = x509.load_pem_x509_certificate((directory / "ca.crt").read_bytes())
        key = serialization.load_pem_private_key((directory / "ca.key").read_bytes(), password=None)
    except (FileNotFoundError, ValueError, TypeError):
        raise ConfigError(f"{directory} has no ca.crt with its ca.key: name another directory") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ConfigError(f"{directory}/ca.key is not the key of ca.crt")
    return certificate, key


def _write_pair(
    directory: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> list[Path]:
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    paths = [directory / f"{name}.key", directory / f"{name}.crt"]
    for path, data in zip(paths, (secret, certificate.public_bytes(pem)), strict=True):
        _write(path, data)
    return paths


def _write(path: Path, data: bytes) -> None:
    """Replace the file atomically, with mode 600: a concurrent reader gets the old or the new content."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
