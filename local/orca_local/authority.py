"""A certificate authority for development: `orca certs` makes one, and certificates for the services' roles.

FOLDER/ca.crt, ca.key                       the authority; with ca.key one can pose as any process
FOLDER/ROLE/tls.crt, tls.key, ca.crt        the `tls_dir` of a process of that role
"""

import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from orca_common.errors import FailedPrecondition
from orca_common.roles import DOMAIN, REDIS, Role
from orca_common.tls import AUTHORITY, CERTIFICATE, KEY

AUTHORITY_KEY = "ca.key"
HOLDERS = (*(role.value for role in Role), REDIS)
HERE = ("localhost", "127.0.0.1", "::1")
SKEW = timedelta(minutes=5)  # by which the clocks of two machines may differ


class Authority:
    """Signs certificates. Its files are in a folder; it is made when the folder has none."""

    def __init__(self, folder: Path, days: float = 3650) -> None:
        """Raises FailedPrecondition when the folder holds an authority that cannot be read."""
        self._folder = folder
        certificate, key = folder / AUTHORITY, folder / AUTHORITY_KEY
        if not certificate.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make(days)
            write(certificate, self.certificate.public_bytes(Encoding.PEM), 0o644)
            write(key, pem_of(self._key), 0o600)
            return
        try:
            self.certificate = x509.load_pem_x509_certificate(certificate.read_bytes())
            loaded = load_pem_private_key(key.read_bytes(), None)
        except (OSError, ValueError) as error:
            raise FailedPrecondition(f"{folder}: holds no authority of `orca certs` ({error})") from None
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise FailedPrecondition(f"{key}: is no key of `orca certs`")
        self._key = loaded

    def _make(self, days: float) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Orca development authority")])
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        unsigned = builder(name, name, self._key.public_key(), timedelta(days=days))
        unsigned = unsigned.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.certificate = unsigned.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())

    def issue(self, holder: str, hosts: Sequence[str] = HERE, lasts: timedelta = timedelta(days=90)) -> Path:
        """Makes a certificate in FOLDER/HOLDER, over the one that is there. Returns that folder.

        holder: one of HOLDERS. hosts: names and IP addresses under which others reach it. lasts: a negative time makes
        one that has expired.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.DNSName(f"{holder}.{DOMAIN}"), *map(host_name, hosts)]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"orca-{holder}")])
        unsigned = builder(self.certificate.subject, subject, key.public_key(), lasts)
        unsigned = unsigned.add_extension(x509.SubjectAlternativeName(names), critical=False)
        unsigned = unsigned.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        signed = unsigned.add_extension(purposes, critical=False).sign(self._key, hashes.SHA256())
        folder = self._folder / holder
        folder.mkdir(mode=0o700, exist_ok=True)
        write(folder / KEY, pem_of(key), 0o600)
        write(folder / CERTIFICATE, signed.public_bytes(Encoding.PEM), 0o644)
        write(folder / AUTHORITY, self.certificate.public_bytes(Encoding.PEM), 0o644)
        return folder


def builder(
    issuer: x509.Name, subject: x509.Name, key: ec.EllipticCurvePublicKey, lasts: timedelta
) -> x509.CertificateBuilder:
    """A certificate from now on. One that lasts a negative time ended that long ago."""
    now = datetime.now(UTC)
    begins = now - SKEW + min(lasts, timedelta()) * 2
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(now + lasts)
    )


def host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def write(file: Path, content: bytes, mode: int) -> None:
    """Replaces a file at once, with these permissions from its first moment."""
    fresh = file.with_name(f".{file.name}.new")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
        out.write(content)
    fresh.replace(file)
