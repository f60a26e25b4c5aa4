"""A whole stack by mTLS: who is refused at every port, a rotation while it runs, and that nothing else listens."""

import asyncio
import re
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import grpc
import httpx2
import psutil
import pytest
import pytest_asyncio
from checkpoints import make_timed

from orca.v1 import worker_pb2 as pb
from orca_client import AsyncOrcaClient, tls_credentials
from orca_common.address import split_address
from orca_common.api_keys import line_of, new_key
from orca_common.roles import Role
from orca_local.authority import Authority
from orca_local.settings import ServeSettings
from orca_local.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")
PAGE = Path(__file__).parents[2] / "docs/security.md"
KEY = new_key()
DOORS = {"/orca.v1.Orca/GetModel", "/orca.v1.Orca/Cancel"}
SUPERVISOR = {"/orca.v1.Supervisor/Watch", "/orca.v1.Supervisor/Fence"}
RANK = {f"/orca.v1.Controller/{name}" for name in ("Hello", "HostStore", "Form", "Allocate", "Run")}
RELAY = "/orca.v1.Controller/Relay"
STREAMS = {"/orca.v1.Controller/Run", RELAY}  # of requests


@dataclass
class Secured:
    """A stack whose processes speak mTLS, and its authority."""

    stack: Stack
    authority: Authority
    certificates: Path
    folder: Path

    def addresses(self, role: str) -> list[str]:
        return [child.address for child in self.stack._children if child.role == role]

    def ranks(self) -> list[pb.RankEntry]:
        return [rank for ranks in self.stack._table.ranks.values() for rank in ranks]

    @property
    def methods(self) -> dict[str, tuple[set[str], Role]]:
        """Address of each gRPC port -> its methods, and the role that may call them."""
        found = {self.stack.grpc_addresses[0]: (DOORS, Role.CLIENT)}
        found |= dict.fromkeys(self.addresses("supervisor"), (SUPERVISOR, Role.SCHEDULER))
        return found | {rank.address: (RANK | {RELAY}, Role.SCHEDULER) for rank in self.ranks()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Secured]:
    folder = tmp_path_factory.mktemp("trust")
    model = make_timed(folder / "model", seconds=0.002, tokenizer=True)
    certificates = folder / "certificates"
    authority = Authority(certificates)
    for role in Role:
        authority.issue(role)
    values = {
        "dtype": "float32",
        "device": "cpu",
        "slots": 256,
        "threads": 1,
        "port": 0,
        "http_port": 0,
    }
    settings = ServeSettings.load(
        model=str(model), pp=2, tls_dir=str(certificates), api_keys=line_of("research", KEY), **values
    )
    stack = Stack(settings, folder / "run", print, ui=True)
    try:
        await stack.start()
        async with asyncio.timeout(60):
            while not any(child.role == "ui" and child.addresses for child in stack.children):
                await asyncio.sleep(0.05)
        yield Secured(stack, authority, certificates, folder)
    finally:
        await stack.stop()


def credentials_of(folder: Path) -> grpc.ChannelCredentials:
    """A caller's, with the certificate in a folder."""
    return tls_credentials(folder)


async def called(
    address: str, method: str, credentials: grpc.ChannelCredentials | None, name: str, key: str | None = KEY
) -> grpc.StatusCode:
    """Calls a method with an empty request. Returns the status."""
    options = [("grpc.ssl_target_name_override", name), ("grpc.use_local_subchannel_pool", 1)]
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options=options)
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    async with channel:
        if method in STREAMS:  # nothing is written: a write could fail before the status comes
            make = channel.stream_unary if method == RELAY else channel.stream_stream
            return await make(method)(timeout=60, metadata=metadata).code()
        call = channel.unary_stream(method)(b"", timeout=60, metadata=metadata)
        try:
            await call.read()
        except grpc.aio.AioRpcError as error:
            return error.code()
        return await call.code() if call.done() else grpc.StatusCode.OK


async def test_a_request_is_served(secured: Secured) -> None:
    credentials = tls_credentials(secured.certificates / "client")
    async with AsyncOrcaClient(secured.stack.grpc_addresses, credentials=credentials, api_key=KEY) as client:
        async with client.generate([1, 2, 3], max_new_tokens=5, ignore_eos=True) as stream:
            await stream.text()
        assert len(stream.tokens) == 5


async def test_who_has_no_certificate_is_refused_at_every_port(secured: Secured) -> None:
    stranger = grpc.ssl_channel_credentials((secured.certificates / "ca.crt").read_bytes())
    for address, (methods, _) in secured.methods.items():
        for method in methods:
            for credentials in (None, stranger):
                assert await called(address, method, credentials, "localhost") is grpc.StatusCode.UNAVAILABLE, method


async def test_an_expired_certificate_and_one_of_another_authority_are_refused_at_every_port(secured: Secured) -> None:
    other = Authority(secured.folder / "other")
    expired = Authority(secured.certificates)  # the same one, which issues into another folder
    expired._folder = secured.folder / "expired"
    expired._folder.mkdir(exist_ok=True)
    for address, (methods, role) in secured.methods.items():
        strange, late = other.issue(role), expired.issue(role, lasts=timedelta(hours=-1))
        for folder in (strange, late):
            own = (folder / "tls.key").read_bytes(), (folder / "tls.crt").read_bytes()
            credentials = grpc.ssl_channel_credentials((secured.certificates / "ca.crt").read_bytes(), *own)
            for method in methods:
                assert await called(address, method, credentials, "localhost") is grpc.StatusCode.UNAVAILABLE


async def test_a_wrong_role_is_refused_at_every_method(secured: Secured) -> None:
    for address, (methods, allowed) in secured.methods.items():
        for method in methods:
            right = Role.WORKER if method == RELAY else allowed
            for role in set(Role) - {right}:
                status = await called(address, method, credentials_of(secured.certificates / role), "localhost")
                assert status is grpc.StatusCode.PERMISSION_DENIED, f"{role} calls {method}"
    pids = [rank.pid for rank in secured.ranks()]
    assert all(psutil.pid_exists(pid) for pid in pids), "nobody was fenced"


async def test_a_server_of_another_role_is_not_spoken_to(secured: Secured) -> None:
    """A scheduler that is led to an endpoint, or an endpoint's thief to a rank, finds that the name is wrong."""
    credentials = credentials_of(secured.certificates / "scheduler")
    rank = secured.ranks()[0].address
    hello, health = "/orca.v1.Controller/Hello", "/grpc.health.v1.Health/Check"
    assert await called(rank, hello, credentials, "worker.orca.internal") is grpc.StatusCode.OK
    assert await called(rank, hello, credentials, "scheduler.orca.internal") is grpc.StatusCode.UNAVAILABLE
    door = secured.stack.grpc_addresses[0]
    assert await called(door, health, credentials, "worker.orca.internal") is grpc.StatusCode.UNAVAILABLE


async def test_a_client_without_a_valid_key_is_refused(secured: Secured) -> None:
    credentials, address = credentials_of(secured.certificates / "client"), secured.stack.grpc_addresses[0]
    for key in (None, new_key()):
        status = await called(address, "/orca.v1.Orca/GetModel", credentials, "localhost", key)
        assert status is grpc.StatusCode.UNAUTHENTICATED
    assert await called(address, "/orca.v1.Orca/GetModel", credentials, "localhost") is grpc.StatusCode.OK


async def test_the_http_door(secured: Secured) -> None:
    assert await models(secured, "client", KEY) == 200
    assert await models(secured, "client", new_key()) == 401
    assert await models(secured, "worker", KEY) == 403
    assert await models(secured, None, KEY) is None


async def models(secured: Secured, role: str | None, key: str) -> int | None:
    """Asks the HTTP door for its models. Returns the status; None: the connection was refused."""
    context = ssl.create_default_context(cafile=secured.certificates / "ca.crt")
    if role is not None:
        context.load_cert_chain(secured.certificates / role / "tls.crt", secured.certificates / role / "tls.key")
    host, port = split_address(secured.stack.http_addresses[0])
    try:
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
        request = (
            f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\nconnection: close\r\n\r\n"
        )
        writer.write(request.encode())
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    except OSError:  # an ssl.SSLError is one
        return None
    return int(answer.split()[1]) if answer else None


async def test_certificates_are_rotated_while_it_runs(secured: Secured) -> None:
    """New certificates take the place of the old ones. New connections are made with them, at every port."""
    before = {address: serial(secured, address) for address in (*secured.methods, secured.stack.http_addresses[0])}
    for role in Role:
        secured.authority.issue(role)
    for address, serial_before in before.items():
        assert serial(secured, address) != serial_before, address
    await test_a_request_is_served(secured)
    assert await models(secured, "client", KEY) == 200


def serial(secured: Secured, address: str) -> str:
    """The serial number of the certificate that a port shows."""
    context = ssl.create_default_context(cafile=secured.certificates / "ca.crt")
    context.load_cert_chain(secured.certificates / "client" / "tls.crt", secured.certificates / "client" / "tls.key")
    context.set_alpn_protocols(["h2", "http/1.1"])
    host, port = split_address(address)
    plain = socket.create_connection((host, port), timeout=10)
    with context.wrap_socket(plain, server_hostname="localhost") as connection:
        shown = connection.getpeercert()
    assert shown is not None
    return str(shown["serialNumber"])


async def test_what_listens_is_what_the_page_lists(secured: Secured) -> None:
    listed = set(
        re.findall(r"^\| (endpoint|scheduler|supervisor|rank|ui) \| ([\w ]+) \|", PAGE.read_text(), re.MULTILINE)
    )
    found: set[tuple[str, str]] = set()
    for child in secured.stack._children:
        known = {split_address(address)[1]: name for name, address in child.addresses.items() if "unix" not in address}
        sockets = listening(child.pid)
        found |= {(child.role, NAMES.get(known.get(port, ""), known.get(port, "?"))) for _, port in sockets}
        if child.role == "redis":
            assert not sockets, "it has a Unix socket instead"
            assert (secured.folder / "run/redis/socket").stat().st_mode & 0o777 == 0o600
        assert all(host == "127.0.0.1" for host, _ in sockets), f"{child.name} listens on {sockets}"
    hosts = 0
    for rank in secured.ranks():
        sockets = listening(rank.pid)
        assert all(host == "127.0.0.1" for host, _ in sockets), f"a rank listens on {sockets}"
        others = len(sockets) - 2  # beside gRPC and the status port: gloo for each group, and the store of one rank
        assert split_address(rank.address)[1] in {port for _, port in sockets}
        assert others in (1, 2)
        hosts += others == 2
        found |= {("rank", "gRPC"), ("rank", "status"), ("rank", "gloo"), ("rank", "store")}
    assert hosts == 1, "one rank hosts the store"
    assert found == listed


async def test_the_live_page_takes_clients_alone_and_calls_as_one(secured: Secured) -> None:
    """It shows a certificate of the role client, so it must not be a way around certificates and keys."""
    address = f"https://{secured.stack.ui_address}"

    def context(role: Role | None) -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=secured.certificates / "ca.crt")
        if role is not None:
            made.load_cert_chain(secured.certificates / role / "tls.crt", secured.certificates / role / "tls.key")
        return made

    for role in (None, Role.WORKER):
        async with httpx2.AsyncClient(base_url=address, verify=context(role), trust_env=False) as stranger:
            with pytest.raises((httpx2.TransportError, ssl.SSLError)):
                await stranger.get("/")
    async with httpx2.AsyncClient(base_url=address, verify=context(Role.CLIENT), trust_env=False) as client:
        assert (await client.get("/")).status_code == 200
        for path in ("/live", "/v1/models"):
            assert (await client.get(path)).status_code == 401
        key = {"authorization": f"Bearer {KEY}"}
        answer = await client.get("/v1/models", headers=key)
        assert (answer.status_code, answer.json()["object"]) == (200, "list")
        async with client.stream("GET", "/live", headers=key) as live:
            async for line in live.aiter_lines():
                if line.startswith("data: ") and "engine-0" in line:
                    break


async def test_a_process_is_told_only_what_it_needs(secured: Secured) -> None:
    """The stack gave every process all that it knew: a supervisor, the keys, and the URL of a Redis of yours."""
    for child in secured.stack.children:
        told = psutil.Process(child.pid).environ().keys() | child._environment.keys()  # a fork reads it from a pipe
        assert ("ORCA_API_KEYS" in told) == (child.role in ("endpoint", "ui")), child.name
        assert ("ORCA_REDIS_URL" in told) == (child.role in ("endpoint", "scheduler")), child.name


NAMES = {"grpc": "gRPC", "address": "gRPC", "http": "HTTP"}


def listening(pid: int | None) -> set[tuple[str, int]]:
    """The addresses that a process listens on, without those of this process and of the fork servers above it: gloo's
    sockets, which tests of engines in this process may have left, are inherited by what it starts. A fork server may
    be older than this test, and keeps what this process has closed since."""
    process = psutil.Process(pid)
    servers = [parent for parent in process.parents() if "orca_worker.processes.fork_server" in parent.cmdline()]
    return addresses_of(process) - set[tuple[str, int]]().union(*map(addresses_of, [psutil.Process(), *servers]))


def addresses_of(process: psutil.Process) -> set[tuple[str, int]]:
    listens = (c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN)
    return {(c.laddr.ip.removeprefix("::ffff:"), c.laddr.port) for c in listens}
