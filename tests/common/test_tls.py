"""The certificate of a process: what is refused, and files that change while servers run."""

import asyncio
import socket
import ssl
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orca_common.errors import FailedPrecondition, PermissionDenied, Unavailable
from orca_common.grpc_server import GrpcServer
from orca_common.roles import REDIS, Role, check_redis, check_role, roles_in
from orca_common.tls import Certificates, MutualTls
from orca_local.authority import Authority


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match=r"tls_dir: .* cannot be used .tls.crt: No such file or directory.$"):
        Certificates(str(tmp_path))
    authority = Authority(tmp_path / "ca")
    folder, other = authority.issue(Role.WORKER), authority.issue(Role.CLIENT)
    Certificates(str(folder))
    (folder / "tls.key").write_bytes((other / "tls.key").read_bytes())
    with pytest.raises(FailedPrecondition, match=r"cannot be used .tls.key is not the key of tls.crt.$"):
        Certificates(str(folder))
    (folder / "ca.crt").unlink()
    with pytest.raises(FailedPrecondition, match=r"cannot be used .ca.crt: No such file or directory.$"):
        Certificates(str(folder))


def test_a_broken_change_leaves_the_certificate_as_it_was(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    folder = authority.issue(Role.WORKER)
    certificates = Certificates(str(folder))
    first = certificates.current()
    (folder / "tls.crt").write_text("half")
    assert certificates.current() == first
    authority.issue(Role.WORKER)
    assert certificates.current() != first


def test_the_authority_keeps_its_key_to_itself(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    folder = authority.issue(Role.WORKER, ["10.0.0.1", "worker.example"])
    assert (tmp_path / "ca/ca.key").stat().st_mode & 0o777 == 0o600
    assert (folder / "tls.key").stat().st_mode & 0o777 == 0o600
    assert Authority(tmp_path / "ca").certificate == authority.certificate, "it is made once"
    (tmp_path / "ca/ca.key").write_text("no key")
    with pytest.raises(FailedPrecondition, match="holds no authority"):
        Authority(tmp_path / "ca")


def test_roles_are_names_of_the_internal_domain() -> None:
    assert roles_in(["worker.orca.internal", "localhost", "10.0.0.1"]) == {Role.WORKER}
    assert roles_in(["client.orca.internal", "endpoint.orca.internal"]) == {Role.CLIENT, Role.ENDPOINT}
    assert roles_in(["worker", "worker.orca.internal.example", "a.worker.orca.internal", "x.orca.internal"]) == set()


def test_a_method_without_a_role_is_for_nobody() -> None:
    service = "/orca.v1.Pod/"
    table = {service: frozenset({Role.CLIENT}), f"{service}Fence": frozenset({Role.WORKER})}

    def callers(method: str) -> set[Role]:
        """The roles that may call a method."""
        may = set[Role]()
        for role in Role:
            with suppress(PermissionDenied):
                check_role(method, table, frozenset({role}))
                may.add(role)
        return may

    assert callers(f"{service}Watch") == {Role.CLIENT}
    assert callers(f"{service}Fence") == {Role.WORKER}, "a method's own line counts before its service's"
    for method in ("/orca.v1.Other/Watch", "/orca.v1.Pod", "Watch", ""):
        assert callers(method) == set()


async def test_a_server_takes_up_new_certificates_and_authorities(tmp_path: Path) -> None:
    """Of a server that is no gRPC server. It is never restarted."""
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    folder = old.issue(Role.ENDPOINT)
    context = Certificates(str(folder)).server_context(client_certificates=True, alpn="h2")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        assert await greeting(port, old.issue(Role.CLIENT)) == b"hello"
        assert await greeting(port, old.issue(Role.CLIENT, lasts=timedelta(hours=-1))) is None, "expired"
        assert await greeting(port, new.issue(Role.CLIENT)) is None
        issued = new.issue(Role.ENDPOINT)
        for name in ("tls.crt", "tls.key", "ca.crt"):
            (folder / name).write_bytes((issued / name).read_bytes())
        assert await greeting(port, new.issue(Role.CLIENT)) == b"hello"
        assert await greeting(port, old.issue(Role.CLIENT)) is None, "the old authority counts no more"


async def test_a_session_is_not_resumed(tmp_path: Path) -> None:
    """Who resumes one shows no certificate, so an authority that was taken away meanwhile would still count."""
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    folder, client = old.issue(Role.ENDPOINT), old.issue(Role.CLIENT)
    served = Certificates(str(folder)).server_context(client_certificates=True, alpn="h2")

    def connect(context: ssl.SSLContext, session: ssl.SSLSession | None) -> ssl.SSLSession | None:
        """The session of a connection over which the server spoke; None: it refused."""
        try:
            plain = socket.create_connection(("127.0.0.1", port), timeout=20)
            with plain, context.wrap_socket(plain, session=session) as connection:
                return connection.session if connection.recv(5) == b"hello" else None
        except OSError:  # an ssl.SSLError is one
            return None

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=served) as server:
        port = server.sockets[0].getsockname()[1]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.load_cert_chain(client / "tls.crt", client / "tls.key")
        session = await asyncio.to_thread(connect, context, None)
        assert session is not None
        issued = new.issue(Role.ENDPOINT)
        for name in ("tls.crt", "tls.key", "ca.crt"):
            (folder / name).write_bytes((issued / name).read_bytes())
        assert await asyncio.to_thread(connect, context, session) is None
        context.maximum_version = ssl.TLSVersion.TLSv1_2  # has other ways to resume
        assert await asyncio.to_thread(connect, context, None) is None


def test_a_key_with_a_password_is_refused(tmp_path: Path) -> None:
    """OpenSSL would ask the terminal for it, and wait."""
    folder = Authority(tmp_path / "ca").issue(Role.WORKER)
    key = load_pem_private_key((folder / "tls.key").read_bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    (folder / "tls.key").write_bytes(locked)
    with pytest.raises(FailedPrecondition, match="cannot be used"):
        Certificates(str(folder))


async def greeting(port: int, client: Path) -> bytes | None:
    """What a server says to a client with this certificate; None: one of the two refuses the other."""
    context = ssl.create_default_context(cafile=client / "ca.crt")
    context.load_cert_chain(client / "tls.crt", client / "tls.key")
    try:
        reader, writer = await asyncio.open_connection("localhost", port, ssl=context)
        said = await reader.read()
        writer.close()
        await writer.wait_closed()
    except OSError:  # an ssl.SSLError is one
        return None
    return said or None


async def test_new_channels_and_running_servers_follow_a_change_of_authority(tmp_path: Path) -> None:
    """Of gRPC. Both sides have folders whose files are replaced by those of another authority. Health is open to a role
    that may call nothing else."""
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    folders = {role: old.issue(role) for role in (Role.SCHEDULER, Role.WORKER)}
    worker, scheduler = (MutualTls(Certificates(str(folders[role]))) for role in (Role.WORKER, Role.SCHEDULER))
    server = GrpcServer((), worker, {}, Unavailable("this server is leaving"), options=[])
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"

    async def check(channel: grpc.aio.Channel) -> None:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)

    async with scheduler.channel(address, Role.WORKER, ()) as before:
        await check(before)
        for role, folder in folders.items():
            issued = new.issue(role)
            for name in ("ca.crt", "tls.key", "tls.crt"):
                (folder / name).write_bytes((issued / name).read_bytes())
        async with scheduler.channel(address, Role.WORKER, ()) as after:
            await check(after)
        await check(before)  # its connection stands
    async with scheduler.channel(address, Role.ENDPOINT, ()) as misled:
        with pytest.raises(grpc.aio.AioRpcError):  # an endpoint was expected there
            await check(misled)
    await server.stop(0)


def test_redis_has_a_name_and_no_role(tmp_path: Path) -> None:
    """So its certificate opens no port of a service."""
    pem = (Authority(tmp_path / "ca").issue(REDIS) / "tls.crt").read_bytes()
    names = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    found = names.get_values_for_type(x509.DNSName)
    assert "redis.orca.internal" in found
    assert roles_in(found) == set()


def test_who_may_be_redis() -> None:
    check_redis(["redis.orca.internal", "localhost"])
    check_redis(["redis.example"])  # from elsewhere
    with pytest.raises(PermissionDenied, match=r"redis_url: .* is that of worker, not of Redis"):
        check_redis(["worker.orca.internal", "localhost"])
