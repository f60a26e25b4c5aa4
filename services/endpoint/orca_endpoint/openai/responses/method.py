"""`POST /v1/responses`, and `GET /v1/responses/{id}` for those that are kept: whole, or the stream from an event on."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Scope

from orca.v1.orca_pb2 import ChatMessage, ResumeRequest
from orca_common.errors import InvalidArgument, NotFound

from ...calls.endpoint import Endpoint
from ...calls.events import Accepted
from ...http.access import caller_in, tenant_in
from ...http.bodies import body_in
from ...http.exchange import Answer, Exchange, deadline_of, silence_of, until
from ...http.request_ids import labels_in
from ..answer import Choice
from ..body import check_names, whole
from ..chat.answer import Logprobs
from ..content import Placed
from ..generations import Single
from ..replies import Replies
from ..stream import Stream
from .answer import NO_EVENTS, PREFIX, UNSEEN, ResponseReply, response_in, told_again
from .items import message_in
from .kept import Kept
from .request import Input, asked, parse

REFERRED = 128  # responses that the items of one input may be of: each is read from the pool
IN_LOOP = 512  # messages, and tokens with all their logprobs, that the loop takes: some 10 ms at most
STORED = "only responses are kept whose store is not false"


class Library:
    """The responses that are kept, by their ids."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._logprobs = Logprobs(endpoint.spell, endpoint.token_bytes)

    def reply(self, name: str, model: str, kept: Kept | None = None, seen: float = UNSEEN) -> ResponseReply:
        """A reply of which nothing has come. model: empty for the endpoint's own. Others as for `ResponseReply`."""
        return ResponseReply(name, model or self._endpoint.name, self._logprobs, kept, seen)

    async def response(self, name: str, tenant: str) -> tuple[Mapping[str, Any], Kept]:
        """The object of a response, as far as it has come, and what is kept of it. Raises NotFound."""
        events, error = await self._endpoint.shown(name, tenant=tenant)
        accepted = events[0]
        assert isinstance(accepted, Accepted)
        if not accepted.kept:
            raise NotFound(f"response {name} is not kept: {STORED}")
        kept = Kept.of(accepted.kept)
        work = partial(told_again, self.reply(name, accepted.adapter, kept, NO_EVENTS), events, error)
        return work() if len(events) <= IN_LOOP else await self._endpoint.large.run(work, tenant), kept

    async def ended(self, name: str, tenant: str, field: str) -> tuple[Sequence[Mapping[str, Any]], Kept]:
        """The items of a response that has ended, for one that goes on from it. Raises InvalidArgument that names this
        field."""
        try:
            response, kept = await self.response(name, tenant)
        except (NotFound, InvalidArgument) as error:
            raise InvalidArgument(field, f"is not known here: {error}") from None
        if response["status"] not in {"completed", "incomplete"}:
            raise InvalidArgument(field, f"is {response['status']}; a conversation goes on from a whole answer")
        return response["output"], kept


class Responses(Replies[Input]):
    """The method as an ASGI application."""

    prefix, form = PREFIX, "text.format"

    def __init__(self, endpoint: Endpoint, library: Library) -> None:
        super().__init__(endpoint)
        self._library = library

    def _parse(self, raw: bytes) -> Input:
        return parse(raw, self._endpoint.defaults)

    def _reply(self, name: str, question: Input) -> ResponseReply:
        model, seen = question.samples[0].request.model, UNSEEN if question.stream else NO_EVENTS
        return self._library.reply(name, model, question.kept, seen)

    async def _complete(self, question: Input, scope: Scope) -> Input:
        tenant, before = tenant_in(scope), list[Placed]()
        if question.previous:
            field = "previous_response_id"
            output, kept = await self._library.ended(question.previous, tenant, field)
            before = [Placed(one, field) for one in (*kept.messages, *map(message_in, output))]
        items = list[Placed]()
        answers = dict[str, dict[str, ChatMessage]]()  # that are referred to, by their ids: their items by theirs
        room = limit = self._endpoint.settings.max_prompt_bytes  # an item may be referred to often
        for one in question.items:
            if isinstance(one, Placed):
                items.append(one)
                continue
            name, field = response_in(one.id), f"{one.place}.id"
            if name not in answers:
                if len(answers) == REFERRED:
                    raise InvalidArgument(field, f"is of one response more than {REFERRED}, which is the limit for it")
                output, _ = await self._library.ended(name, tenant, field)
                answers[name] = {item["id"]: message_in(item) for item in output}
            message = answers[name].get(one.id)
            if message is None:
                raise InvalidArgument(field, f"is not in the response {name}")
            room -= message.ByteSize()
            if room < 0:
                raise InvalidArgument(field, f"is too much: a chat has at most {limit} bytes")
            items.append(Placed(message, one.place))
        work = partial(asked, question, before, items)
        few = len(before) + len(items) <= IN_LOOP
        return work() if few else await self._endpoint.large.run(work, caller_in(scope))


class KeptResponses(Exchange):
    """`GET /v1/responses/{id}` as an ASGI application: as far as a response has come, or its stream from an event on,
    which ends an older stream of it with an error."""

    def __init__(self, endpoint: Endpoint, library: Library) -> None:
        self._endpoint, self._library = endpoint, library

    async def _serve(self, request: Request, answer: Answer) -> None:
        endpoint, tenant, deadline = self._endpoint, tenant_in(request.scope), deadline_of(request)
        silence = silence_of(request, endpoint.settings.comment_seconds)
        name, seen = request.path_params["id"], seen_in(request)
        if (model := request.query_params.get("model")) is not None:
            endpoint.check_model(model)
        response, _ = await self._library.response(name, tenant)
        if seen is None:
            await answer.whole(JSONResponse(response))
            return
        call = endpoint.resume(ResumeRequest(request_id=name), deadline, dict(request.headers), tenant=tenant)
        call.label(labels_in(request.scope))
        async with Single(call, body_in(request.scope).held) as events, until(deadline):
            stream = Stream(answer, self._library.reply(name, response["model"], seen=seen), silence)
            await stream.write(events, [Choice()], name)
            await stream.end(None)


def seen_in(request: Request) -> int | None:
    """The number of the last event that the client has seen; None: it wants no stream. Raises InvalidArgument."""
    given = request.query_params.multi_items()
    values = dict(given)
    check_names(values, {"stream", "starting_after", "include_obfuscation", "model"})
    for name in values:
        if len(request.query_params.getlist(name)) > 1:
            raise InvalidArgument(name, "comes twice")
    streams = values.get("stream", "false")
    if streams not in {"true", "false"}:
        raise InvalidArgument("stream", "must be true or false")
    if values.get("include_obfuscation", "false") != "false":
        raise InvalidArgument("include_obfuscation", "must be false: events are not padded")
    if streams == "false":
        if "starting_after" in values:
            raise InvalidArgument("starting_after", "is allowed only with stream=true")
        return None
    if "starting_after" not in values:
        return UNSEEN
    number = whole(values["starting_after"])
    if number is None:
        raise InvalidArgument("starting_after", "must be the number of an event")
    return number
