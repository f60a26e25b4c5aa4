"""`GET .../{id}`: takes the stream of an answer up where it broke, at any endpoint. Ours, not OpenAI's.

`from` is the number of tokens that the client has seen, or the id of the last event (`answer.SeenTo`). `Last-Event-ID`,
which a browser's EventSource sends by itself, is the same and counts before it. `model` is for a proxy that chooses the
release by it; the chunks name the model or adapter that answers. The older stream of the answer ends with an error.
"""

from collections.abc import Callable

from starlette.requests import Request

from orca.v1.orca_pb2 import ResumeRequest
from orca_common.errors import DataLoss, InvalidArgument, NotFound, Unavailable

from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..calls.events import Accepted
from ..http.access import tenant_in
from ..http.bodies import body_in
from ..http.exchange import EVENT_ID, Answer, Exchange, deadline_of, silence_of, until
from ..http.request_ids import labels_in
from .answer import Choice, Numbered, SeenTo, UsageIn
from .body import check_names, whole
from .generations import Single
from .stream import ChoiceChunks, Stream


class Resumed(Exchange):
    """The method as an ASGI application."""

    def __init__(self, endpoint: Endpoint, chunks: Callable[[str, UsageIn], ChoiceChunks]) -> None:
        """chunks: makes those of an answer, by its id and which of them have a usage; they are numbered."""
        self._endpoint, self._chunks = endpoint, chunks

    async def _serve(self, request: Request, answer: Answer) -> None:
        try:
            await self._resume(request, answer)
        except Unavailable as error:
            event = request.headers.get(EVENT_ID)
            if answer.started or event is None:
                raise
            await answer.ask_again(error, event)

    async def _resume(self, request: Request, answer: Answer) -> None:
        endpoint, deadline = self._endpoint, deadline_of(request)
        silence = silence_of(request, endpoint.settings.comment_seconds)
        field, seen, include_usage = asked_in(request)
        model = request.query_params.get("model")
        if model is not None:
            endpoint.check_model(model)
        wanted = ResumeRequest(request_id=request.path_params["id"], from_index=seen.tokens)
        call = endpoint.resume(wanted, deadline, dict(request.headers), tenant=tenant_in(request.scope))
        call.label(labels_in(request.scope))
        choice = Choice()
        choice.shown_tokens, choice.seen_end = seen
        chunks = self._chunks(wanted.request_id, UsageIn(end=include_usage))
        stream = Stream(answer, chunks, silence)
        async with Single(call, body_in(request.scope).held) as events, until(deadline):
            try:
                await stream.write(_going_on(events, call, choice, chunks), [choice], wanted.request_id)
            except DataLoss as error:
                if call.accepted:
                    raise
                # gRPC says DATA_LOSS: its clients have surely seen tokens. Here the number is all that there is.
                if call.unknown:
                    raise NotFound(str(error)) from None
                raise InvalidArgument(field, f"is {seen.tokens}, and the answer has fewer tokens") from None
            counts = choice.input_tokens, choice.output_tokens, choice.cached_tokens
            await stream.end(counts if include_usage else None)


async def _going_on(events: Numbered, call: Call, choice: Choice, chunks: ChoiceChunks) -> Numbered:
    """Puts the choice's text behind what the client has seen of it, and names the adapter that answers."""
    async for n, piece in events:
        if isinstance(first := piece[0], Accepted) and first.adapter:
            chunks.name_model(first.adapter)
        choice.offset = max(choice.offset, call.characters_before)
        yield n, piece


def asked_in(request: Request) -> tuple[str, SeenTo, bool]:
    """The field that says from where on, what it says, and whether the usage is wanted. Raises InvalidArgument."""
    given = request.query_params.multi_items()
    names = [name for name, _ in given]
    check_names(names, {"from", "include_usage", "model"})
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgument(name, "comes twice")
    values = dict(given)
    usage = values.get("include_usage", "false")
    if usage not in {"true", "false"}:
        raise InvalidArgument("include_usage", "must be true or false")
    seen = request.headers.get(EVENT_ID)
    field, text = ("from", values.get("from", "0")) if seen is None else (EVENT_ID, seen)
    tokens, _, end = text.partition(".")
    index = whole(tokens)
    if index is None or text not in (tokens, f"{tokens}.1", f"{tokens}.2"):
        raise InvalidArgument(field, "must be a number of tokens, or the id of an event")
    return field, SeenTo(index, int(end or 0)), usage == "true"
