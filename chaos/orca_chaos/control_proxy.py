"""A proxy for the control plane: it passes on any gRPC call as bytes, message by message, as its link lets it.

It listens only while the process behind it listens: a master takes a rank that accepts connections and does not answer
for a frozen one.

A message that comes twice on a stream is passed on twice; a call with one message is called twice, and the first answer
dropped. A lost message ends its call with UNAVAILABLE: in gRPC no message of a stream is lost while the stream lives.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Set
from typing import Any

import grpc

from orca_common.address import split_address

from .links import Broken, Direction, Link

OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
]
STREAMS = ("/Run", "/Relay", "/Watch")  # the methods whose calls have more than one message on a side
Change = Callable[[bytes], Awaitable[bytes]]
Messages = AsyncIterator[bytes]


class ControlProxy(grpc.GenericRpcHandler):
    """Has a port of 127.0.0.1. `sent` and `answered`: changes to the messages of some methods, by the method's name."""

    def __init__(self, link: Link, upstream: str, sent: Mapping[str, Change], answered: Mapping[str, Change]) -> None:
        self._link, self._upstream = link, split_address(upstream)
        self._sent, self._answered = sent, answered
        self._server: grpc.aio.Server | None = None  # None: the process does not listen
        self._channel = grpc.aio.insecure_channel(upstream, options=OPTIONS)
        self._reserved = socket.socket()  # holds the port while the proxy does not listen
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._reserved.getsockname()[1]}"

    async def follow(self, ports: Set[int]) -> None:
        """Listens when the process does, and only then. ports: those at which anybody listens."""
        listens = self._upstream[1] in ports
        if listens and self._server is None:
            server = grpc.aio.server(options=OPTIONS)
            server.add_generic_rpc_handlers((self,))
            server.add_insecure_port(self.address)
            await server.start()
            self._server = server
        elif not listens and self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)

    async def stop(self) -> None:
        await self.follow(frozenset())
        await self._channel.close()
        self._reserved.close()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method = handler_call_details.method

        async def behave(messages: Messages, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            async for answer in self._call(method, messages, context):
                yield answer

        return grpc.stream_stream_rpc_method_handler(behave)  # on the wire, other calls are streams of one message

    async def _call(self, method: str, messages: Messages, context: Any) -> AsyncIterator[bytes]:
        link, name, streams = self._link, method.rpartition("/")[2], method.endswith(STREAMS)
        sent, lost = _changed(self._sent.get(name), messages), asyncio.Event()
        try:
            if link.broken:
                raise Broken
            if streams:
                upstream = self._open(method, self._carried(sent, lost), context)
            else:
                request = [message async for message in sent]
                for _ in range(await link.carry(Direction.TO) - 1):
                    await self._open(method, _each(request), context).read()
                upstream = self._open(method, _each(request), context)
        except Broken:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"chaos: {link.name}")
            return
        cut = [asyncio.create_task(_cancel_after(wait, upstream)) for wait in (link.breaks(), lost.wait())]
        try:
            await context.send_initial_metadata(tuple(await upstream.initial_metadata() or ()))
            change = self._answered.get(name)
            while (answer := await upstream.read()) is not grpc.aio.EOF:
                if change is not None:
                    answer = await change(answer)
                for _ in range(await link.carry(Direction.FROM, may_double=streams)):
                    yield answer
        except (Broken, grpc.aio.AioRpcError):
            pass  # the status follows
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the caller has left
                raise
        finally:
            for task in cut:
                task.cancel()
            upstream.cancel()  # the caller may have left, or a message was lost
        code = await upstream.code()
        if code is grpc.StatusCode.CANCELLED:  # above, or by a cut
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"chaos: {link.name}")
        metadata = tuple(await upstream.trailing_metadata() or ())
        if code is not grpc.StatusCode.OK:
            await context.abort(code, await upstream.details() or "", metadata)
        context.set_trailing_metadata(metadata)

    def _open(self, method: str, messages: Messages, context: Any) -> Any:
        remaining = context.time_remaining()
        return self._channel.stream_stream(method)(
            messages,
            timeout=remaining,
            metadata=context.invocation_metadata(),
            wait_for_ready=remaining is not None,  # a call with a deadline may wait for its rank, as its caller does
        )

    async def _carried(self, messages: Messages, lost: asyncio.Event) -> Messages:
        """The messages that arrive. Sets `lost` when one does not."""
        try:
            async for message in messages:
                for _ in range(await self._link.carry(Direction.TO)):
                    yield message
        except Broken:
            lost.set()
            await (
                asyncio.Event().wait()
            )  # until the call is cancelled: an end would tell the other side that all is well


async def _cancel_after(event: Awaitable[object], call: Any) -> None:
    await event
    call.cancel()


async def _changed(change: Change | None, messages: Messages) -> Messages:
    async for message in messages:
        yield await change(message) if change else message


async def _each(messages: list[bytes]) -> Messages:
    for message in messages:
        yield message
