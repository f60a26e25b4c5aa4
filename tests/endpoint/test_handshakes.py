"""TLS at both doors, before it stands: a connection counts from its first moment, and its handshake has an end."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from endpoint.harness import World, until, world

from orca_common.roles import Role
from orca_local.authority import Authority

PEER_CONNECTIONS, CONNECTIONS = 3, 5
GET = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
BOUNDS = {"max_peer_connections": PEER_CONNECTIONS, "max_connections": CONNECTIONS, "header_seconds": 1.0}
HALF_A_HELLO = b"\x16\x03\x01\x02\x00\x01"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@pytest.fixture
async def secured(redis_url: str, model: Path, authority: Authority) -> AsyncIterator[World]:
    async with world(redis_url, model, tls_dir=str(authority.issue(Role.ENDPOINT)), **BOUNDS) as started:
        yield started


@pytest.fixture
async def patient(redis_url: str, model: Path, authority: Authority) -> AsyncIterator[World]:
    """Handshakes have as long as they want: only the counts close connections."""
    bounds = {**BOUNDS, "header_seconds": 600.0}
    async with world(redis_url, model, tls_dir=str(authority.issue(Role.ENDPOINT)), **bounds) as started:
        yield started


async def connected(orca: World, door: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = orca.serving.addresses[door].rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def ended(reader: asyncio.StreamReader) -> bool:
    """Waits until the door closes the connection."""
    try:
        async with asyncio.timeout(20):
            while await reader.read(1 << 16):
                pass
    except ConnectionError:
        pass
    return True


async def answer(orca: World, client: Path, raw: bytes = GET) -> tuple[bytes, bytes]:
    """What the HTTP door answers to an honest client, and the door's certificate."""
    host, _, port = orca.serving.addresses["http"].rpartition(":")
    context = ssl.create_default_context(cafile=client / "ca.crt")
    context.load_cert_chain(client / "tls.crt", client / "tls.key")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    writer.write(raw)
    async with asyncio.timeout(20):
        said = await reader.read()
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return said, shown


def open_connections(orca: World) -> int:
    return orca.serving.app._http.connections.peers.total()


@pytest.mark.parametrize("door", ["http", "grpc"])
@pytest.mark.parametrize("said", [b"", HALF_A_HELLO], ids=["nothing", "half a hello"])
async def test_a_handshake_that_does_not_end_is_given_up(secured: World, door: str, said: bytes) -> None:
    reader, writer = await connected(secured, door)
    writer.write(said)
    assert await ended(reader)
    writer.close()
    await until(lambda: open_connections(secured) == 0)


async def test_handshakes_at_the_http_door_count(patient: World, authority: Authority) -> None:
    client = authority.issue(Role.CLIENT)
    strangers = [await connected(patient, "http") for _ in range(PEER_CONNECTIONS)]
    await until(lambda: open_connections(patient) == PEER_CONNECTIONS)
    with pytest.raises((ConnectionError, ssl.SSLError)):
        await answer(patient, client)
    for _, writer in strangers:
        writer.close()
    await until(lambda: open_connections(patient) == 0)
    assert (await answer(patient, client))[0].startswith(b"HTTP/1.1 200")
    await until(lambda: open_connections(patient) == 0)


async def test_handshakes_at_the_grpc_door_count(patient: World) -> None:
    """A server of gRPC counts a connection when it accepts it, so more are closed before they say anything."""
    strangers = [await connected(patient, "grpc") for _ in range(3 * CONNECTIONS)]
    ends = [asyncio.create_task(ended(reader)) for reader, _ in strangers]
    try:
        await until(lambda: sum(end.done() for end in ends) >= 2 * CONNECTIONS)
    finally:
        for _, writer in strangers:
            writer.close()
        await asyncio.gather(*ends)


@pytest.mark.parametrize("door", ["http", "grpc"])
async def test_plain_text_at_the_port_of_tls(
    secured: World, authority: Authority, door: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The HTTP door says what is wrong, to the client and in its log; the client had an empty answer."""
    caplog.set_level(logging.INFO, "orca_endpoint.http.listener")
    reader, writer = await connected(secured, door)
    host, port = writer.get_extra_info("sockname")
    writer.write(GET)
    async with asyncio.timeout(20):
        said = await reader.read(1 << 16)
    if door == "http":
        assert said.startswith(b"HTTP/1.1 400")
        assert b"call it with https://" in said
        assert handshakes(caplog) == [(f"{host}:{port}", "this port speaks TLS; call it with https://")]
    writer.close()
    await until(lambda: open_connections(secured) == 0)
    assert (await answer(secured, authority.issue(Role.CLIENT)))[0].startswith(b"HTTP/1.1 200")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def handshakes(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Peer and error of each handshake that failed, as the log has them."""
    return [(r.peer, r.error) for r in caplog.records if r.msg == "a TLS handshake failed"]  # type: ignore[attr-defined]


async def test_a_client_without_a_certificate(
    secured: World, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """It hears TLS's own words, also when it has sent a request at once, as all clients do. asyncio sent no alert."""
    caplog.set_level(logging.INFO, "orca_common.tls")
    context = ssl.create_default_context(cafile=authority.issue(Role.CLIENT) / "ca.crt")
    host, _, port = secured.serving.addresses["http"].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    name = "{}:{}".format(*writer.get_extra_info("sockname"))
    writer.write(GET)
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
        await reader.read()
    writer.close()
    await until(lambda: handshakes(caplog) == [(name, "PEER_DID_NOT_RETURN_A_CERTIFICATE")])
    await until(lambda: open_connections(secured) == 0)


async def test_the_http_door_takes_up_new_certificates(secured: World, authority: Authority) -> None:
    client = authority.issue(Role.CLIENT)
    _, first = await answer(secured, client)
    _, same = await answer(secured, client)
    authority.issue(Role.ENDPOINT)
    said, second = await answer(secured, client)
    assert first == same != second
    assert said.startswith(b"HTTP/1.1 200")


async def test_a_client_of_another_role_hears_why_it_is_refused(secured: World, authority: Authority) -> None:
    said, _ = await answer(secured, authority.issue(Role.WORKER))
    assert said.startswith(b"HTTP/1.1 403")
    assert b"is for the role client" in said


async def test_a_door_that_leaves_waits_for_no_handshake(secured: World) -> None:
    reader, writer = await connected(secured, "http")
    await until(lambda: open_connections(secured) == 1)
    await secured.serving.app._http.stop()
    assert await ended(reader)
    assert open_connections(secured) == 0
    writer.close()
