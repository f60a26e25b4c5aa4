"""A relay counts as connected when its neighbour has taken the stream, and not before."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from orca.v1 import worker_pb2 as pb
from orca.v1.worker_pb2_grpc import ControllerServicer, add_ControllerServicer_to_server
from orca_common.errors import Unavailable
from orca_common.roles import Role
from orca_common.tls import transport_of
from orca_local.authority import Authority
from orca_worker.rank import epoch
from orca_worker.rank.epoch import Neighbour


class Deaf(ControllerServicer):
    """Takes streams and says nothing, as behind a connection that is dead."""

    async def Relay(self, request_iterator: AsyncIterator[pb.Iteration], context: Any) -> pb.RelayResponse:  # noqa: N802
        if self.answers:
            await context.send_initial_metadata(())
        await asyncio.Event().wait()
        return pb.RelayResponse()

    answers = False


@pytest.mark.parametrize("answers", [False, True])
async def test_a_neighbour_that_does_not_answer_is_not_connected(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch, "ANSWER", 20.0 if answers else 0.5)
    server, deaf = grpc.aio.server(), Deaf()
    deaf.answers = answers
    add_ControllerServicer_to_server(deaf, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    neighbour = Neighbour(f"127.0.0.1:{port}", transport_of(None), lambda sentence: None)
    try:
        if answers:
            await neighbour.connected()
        else:
            with pytest.raises(Unavailable, match="did not answer within"):
                await neighbour.connected()
    finally:
        neighbour.close()
        await server.stop(0)


async def test_a_neighbour_that_cannot_be_reached_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It takes the connection and never answers the handshake, as a process that is frozen, or a dead link."""
    monkeypatch.setattr(epoch, "ANSWER", 0.5)
    certificate = Authority(tmp_path / "ca").issue(Role.WORKER)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        neighbour = Neighbour(address, transport_of(str(certificate)), lambda sentence: None)
        try:
            async with asyncio.timeout(20):
                with pytest.raises(Unavailable, match=r"did not answer within 0\.5 s"):
                    await neighbour.connected()
        finally:
            neighbour.close()
