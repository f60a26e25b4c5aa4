"""mTLS between the services: one folder with a certificate for each process, or plaintext without one.

The folder has the files of a Kubernetes Secret: `tls.crt` (the certificate, then those between it and the authority),
`tls.key`, and `ca.crt` (the authority, or several of them while one follows another). Both sides of a connection show a
certificate that one of these authorities has signed; `roles` says what each may do.

The files are read again when they have changed. Connections that stand go on; a new one uses the new files. So a
certificate is rotated without a restart.
"""

import logging
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from .errors import FailedPrecondition
from .file_version import version_of
from .lanes.client import LaneConnection, Tls, connect
from .roles import Role

log = logging.getLogger(__name__)

Options = Sequence[tuple[str, Any]]
ALPN = "h2"
# Else a channel takes over what a closed one to the same address left: its backoff, and the failure that it had last.
OWN_CONNECTIONS = ("grpc.use_local_subchannel_pool", 1)
CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
UNUSABLE: Mapping[str | None, str] = {  # by OpenSSL's reason, what is wrong with the files
    "KEY_VALUES_MISMATCH": f"{KEY} is not the key of {CERTIFICATE}",
    "NO_CERTIFICATE_OR_CRL_FOUND": f"{AUTHORITY} holds no certificate in PEM",
    None: f"{CERTIFICATE} or {KEY} is no PEM, or the key has a password",
}
NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST")  # OpenSSL's reasons: a client that would not understand an alert


class Material(NamedTuple):
    """The certificates and the key, as PEM."""

    certificate: bytes
    key: bytes
    authority: bytes


class Certificates:
    """The certificate of this process. Any thread may ask for it."""

    def __init__(self, folder: str) -> None:
        """Raises FailedPrecondition when a file is missing, or the key is not the certificate's."""
        self.folder = Path(folder)
        self.files = tuple(self.folder / name for name in (CERTIFICATE, KEY, AUTHORITY))
        self._lock = threading.Lock()
        self._version = version_of(*self.files)
        self._material = self._read()

    def current(self) -> Material:
        """The files' content, read again when they have changed. Unusable ones are logged; the old content stays."""
        with self._lock:
            version = version_of(*self.files)
            if version != self._version:
                self._version = version
                try:
                    self._material = self._read()
                    log.info("certificate read again", extra={"folder": str(self.folder)})
                except FailedPrecondition as error:
                    log.error("the certificate was not read again: %s", error)
            return self._material

    def _read(self) -> Material:
        certificate, key, authority = self.files
        try:
            material = Material(certificate.read_bytes(), key.read_bytes(), authority.read_bytes())
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            return material
        except ssl.SSLError as error:  # an OSError, too
            why = UNUSABLE.get(error.reason or None, str(error))
        except OSError as error:
            why = f"{Path(error.filename).name}: {error.strerror}" if error.filename else str(error.strerror)
        raise FailedPrecondition(f"tls_dir: {self.folder} cannot be used ({why})")

    def _load(self, context: ssl.SSLContext) -> None:
        certificate, key, authority = self.files
        context.load_cert_chain(certificate, key, password=_no_password)
        context.load_verify_locations(authority)

    def server_context(self, *, client_certificates: bool, alpn: str) -> ssl.SSLContext:
        """The context of a TLS server that is not grpcio's. New connections use the files as they are then.

        alpn: what is spoken over TLS, "h2" or "http/1.1".
        """
        used = self.current()
        newest = self._new_context(client_certificates, alpn)

        def renew(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
            nonlocal used, newest
            found = self.current()
            if found != used:
                used, newest = found, self._new_context(client_certificates, alpn)
            connection.context = newest

        first = self._new_context(client_certificates, alpn)
        first.sslobject_class = ToldHandshake
        first.sni_callback = renew  # called at the beginning of each handshake
        return first

    def client_context(self, alpn: str) -> ssl.SSLContext:
        """The context of a TLS client that is not grpcio's: one connection's, for the files may change."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([alpn])
        self._load(context)
        return context

    def _new_context(self, client_certificates: bool, alpn: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([alpn])
        if client_certificates:
            context.verify_mode = ssl.CERT_REQUIRED
            # Who resumes a session shows no certificate, so that session would outlive its authority. In TLS 1.3 no
            # session can be resumed without a ticket; in TLS 1.2 Python cannot forbid it.
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.num_tickets = 0
        self._load(context)
        return context


def _no_password() -> str:
    """Without it, OpenSSL asks the terminal for the password of an encrypted key, and waits."""
    return ""


peer_of_handshake: ContextVar[str] = ContextVar("peer_of_handshake", default="")  # for the log


class ToldHandshake(ssl.SSLObject):
    """A server's TLS handshake. When it fails, the client receives TLS's alert, and the log has a line.

    asyncio closes a connection as soon as its handshake has failed, and drops the alert that OpenSSL has written. So a
    handshake that goes wrong says at first that it needs more from the client. asyncio then sends the alert, and
    receives the error when the client sends something more, or leaves.
    """

    _failed: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        if self._failed is not None:
            raise self._failed
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, ssl.SSLSyscallError):
            raise
        except ssl.SSLError as error:
            log.info("a TLS handshake failed", extra={"peer": peer_of_handshake.get(), "error": error.reason})
            if error.reason in NO_TLS:
                raise
            self._failed = error
            raise ssl.SSLWantReadError from error


class Plaintext:
    """The services' transport without encryption and without certificates."""

    def channel(self, address: str, role: Role, options: Options) -> grpc.aio.Channel:
        """A channel to a service of this role."""
        return grpc.aio.insecure_channel(address, options=[*options, OWN_CONNECTIONS])

    async def connect(self, address: str, role: Role) -> LaneConnection:
        """A connection of control lanes to such a service. Raises OSError (ssl.SSLError is one)."""
        return await connect(address, None)

    def server_context(self) -> ssl.SSLContext | None:
        """The TLS of a server that is not grpcio's; None: plaintext."""
        return None

    def listen(self, server: grpc.aio.Server, address: str, *, client_certificates: bool = True) -> int:
        """Adds a port to a server and returns its number. Raises RuntimeError when it is taken."""
        return server.add_insecure_port(address)


class MutualTls:
    """The same by mTLS: both sides show certificates, and no stranger can pretend to be a service."""

    def __init__(self, certificates: Certificates) -> None:
        self.certificates = certificates

    def channel(self, address: str, role: Role, options: Options) -> grpc.aio.Channel:
        material = self.certificates.current()
        credentials = grpc.ssl_channel_credentials(material.authority, material.key, material.certificate)
        # Addresses of pods are not known when certificates are made. The role's name takes the place of the host's.
        named = [*options, OWN_CONNECTIONS, ("grpc.ssl_target_name_override", role.dns_name)]
        return grpc.aio.secure_channel(address, credentials, options=named)

    async def connect(self, address: str, role: Role) -> LaneConnection:
        return await connect(address, Tls(self.certificates.client_context(ALPN), role.dns_name))

    def server_context(self) -> ssl.SSLContext | None:
        return self.certificates.server_context(client_certificates=True, alpn=ALPN)

    def listen(self, server: grpc.aio.Server, address: str, *, client_certificates: bool = True) -> int:
        fetch = fetcher(self.certificates)
        credentials = grpc.dynamic_ssl_server_credentials(fetch(), fetch, client_certificates)
        return server.add_secure_port(address, credentials)


Transport = Plaintext | MutualTls


def fetcher(certificates: Certificates) -> Callable[[], Any]:
    """gRPC calls this at each handshake: returns the certificate if it has changed since the last call, else None."""
    told: Material | None = None

    def fetch() -> Any:
        nonlocal told
        material = certificates.current()
        if material == told:
            return None
        told = material
        return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], material.authority)

    return fetch


def transport_of(tls_dir: str | None) -> Transport:
    """The transport of a service, by its setting. Raises FailedPrecondition when the folder cannot be used."""
    return Plaintext() if tls_dir is None else MutualTls(Certificates(tls_dir))
