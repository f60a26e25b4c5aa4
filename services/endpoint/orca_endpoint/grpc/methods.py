"""The methods of `orca.v1.Orca`. They translate and delegate; the door makes statuses of their errors."""

from functools import partial
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from orca.v1.orca_pb2 import (
    CancelRequest,
    CancelResponse,
    FinishReason,
    GenerateRequest,
    GenerateTextResponse,
    GetModelRequest,
    ResumeRequest,
)
from orca_common.api_keys import AUTHORIZATION, ApiKeys
from orca_common.errors import Cancelled
from orca_common.grpc_server import ServerCall

from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..requests.limits import Held, Limits
from ..requests.threads import BODY_IN_LOOP
from ..requests.unknown_fields import parse_known
from ..requests.validation import MAX_INTERVAL
from .answers import Encoder, add

M = TypeVar("M", bound=Message)

ORCA = "orca.v1.Orca"


class OrcaMethods:
    def __init__(self, endpoint: Endpoint, keys: ApiKeys, limits: Limits) -> None:
        self._endpoint, self._keys, self._limits = endpoint, keys, limits

    def handlers(self) -> grpc.GenericRpcHandler:
        """Handlers of streams of bytes: the methods read their request themselves, and write serialized messages."""
        methods = {
            "Generate": self.generate,
            "GenerateText": self.generate_text,
            "Resume": self.resume,
            "Cancel": self.cancel,
            "GetModel": self.get_model,
        }
        handlers = {name: grpc.stream_stream_rpc_method_handler(method) for name, method in methods.items()}
        return grpc.method_handlers_generic_handler(ORCA, handlers)

    async def generate(self, _: object, on: ServerCall) -> None:
        with self._limits.body(on.host) as held:
            with self._endpoint.arrivals.coming():
                request = await self._read(on, GenerateRequest, held)
                call = await self._call(request, on)
            del request  # a long prompt needs memory, and the pool has it
            await self._stream(call, on, held)

    async def generate_text(self, _: object, on: ServerCall) -> bytes:
        with self._limits.body(on.host) as held:
            with self._endpoint.arrivals.coming():
                request = await self._read(on, GenerateRequest, held)
                logprobs = request.logprobs or request.top_logprobs > 0
                request.stream_interval = max(request.stream_interval, MAX_INTERVAL)  # a larger one is refused
                call = await self._call(request, on)
            del request  # a long prompt needs memory, and the pool has it
            return await self._answer(call, logprobs, held)

    async def _answer(self, call: Call, logprobs: bool, held: Held) -> bytes:
        answer = GenerateTextResponse()
        texts: list[str] = []
        async with call:
            async for piece in call.pieces():
                held.release()  # the first piece says that the pool has the request
                for event in piece:
                    add(event, answer, texts, logprobs)
        if answer.reason == FinishReason.FINISH_REASON_CANCELLED:
            raise Cancelled(f"request {answer.request_id} was cancelled after {len(answer.token_ids)} tokens")
        answer.text = "".join(texts)
        return answer.SerializeToString()

    async def resume(self, _: object, on: ServerCall) -> None:
        with self._limits.body(on.host) as held:
            request = await self._read(on, ResumeRequest, held)
            call = self._endpoint.resume(request, on.deadline, on.metadata, tenant=self._tenant(on))
            await self._stream(call, on, held)

    async def cancel(self, _: object, on: ServerCall) -> bytes:
        with self._limits.body(on.host) as held:
            request = await self._read(on, CancelRequest, held)
            alive = await self._endpoint.cancel(request, tenant=self._tenant(on))
        return CancelResponse(alive=alive).SerializeToString()

    async def get_model(self, _: object, on: ServerCall) -> bytes:
        with self._limits.body(on.host) as held:
            await self._read(on, GetModelRequest, held)
        return (await self._endpoint.model()).SerializeToString()

    async def _read(self, on: ServerCall, kind: type[M], held: Held) -> M:
        """Reads the one message of a call, counted in `held` while it is in memory. A large one is parsed in a thread.

        Raises InvalidArgument when it cannot be parsed or has a field that is not known, and what the guard raises.
        """
        raw = await on.only()
        held.add(len(raw))
        parse = partial(on.parsed, partial(parse_known, kind), raw)
        if len(raw) <= BODY_IN_LOOP:
            return parse()
        return await self._endpoint.large.run(parse, self._tenant(on) or on.host)

    async def _call(self, request: GenerateRequest, on: ServerCall) -> Call:
        tenant = self._tenant(on)
        return await self._endpoint.generate(request, on.deadline, on.metadata, tenant=tenant, host=on.host)

    def _tenant(self, on: ServerCall) -> str:
        return self._keys.tenant_of(on.once(AUTHORIZATION))

    async def _stream(self, call: Call, on: ServerCall, held: Held) -> None:
        encode = Encoder().encode
        async with call:
            async for piece in call.pieces():
                await on.write(encode(piece))
                held.release()  # the first piece says that the pool has the request
