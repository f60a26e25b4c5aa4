"""What one iteration brings to the streams of one connection arrives there together."""

import os
import threading
from collections.abc import AsyncIterator

import http2
from endpoint.harness import World, generation, until
from http2 import Frame, Http2

from orca_endpoint.bursts import FEW, POLLER

PATH = "/orca.v1.Orca/Generate"


async def read(frames: AsyncIterator[Frame], messages: int) -> None:
    """Reads until so many messages have come."""
    async for frame in frames:
        messages -= frame.kind == http2.DATA and bool(frame.payload)
        if not messages:
            return


async def test_the_tokens_of_an_iteration_are_one_packet_to_a_client_of_several_streams(orca: World) -> None:
    streams = FEW + 4
    body = http2.message(generation(max_new_tokens=8).SerializeToString())
    async with Http2.connected(orca.serving.addresses["grpc"]) as client:
        for stream in range(1, 2 * streams, 2):
            client.write(http2.frame(http2.HEADERS, http2.END_HEADERS, stream, http2.call(PATH)))
            client.write(http2.frame(http2.DATA, http2.END_STREAM, stream, body))
        claimed = [await orca.engine.claim() for _ in range(streams)]
        frames = client.frames()
        await read(frames, streams)  # each is accepted
        for index in range(4):
            before = client.packets
            await orca.engine.commit_together(claimed, index, 7)
            await read(frames, streams)
            assert client.packets - before <= 2, "one, and perhaps one of gRPC's own"
    await until(lambda: orca.serving.app.delivery.count == 0)
    assert orca.serving.app._grpc._bursts.streams == 0  # and no descriptor is left


async def test_the_thread_that_hears_of_written_messages_waits_for_the_loop(orca: World) -> None:
    pollers = [thread.native_id for thread in threading.enumerate() if POLLER in thread.name]
    assert [os.sched_getscheduler(number) for number in pollers if number is not None] == [os.SCHED_BATCH]
