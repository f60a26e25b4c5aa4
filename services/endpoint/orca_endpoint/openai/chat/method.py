"""`POST /v1/chat/completions`: from the body to the last byte of the answer."""

import secrets
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...calls.endpoint import Endpoint
from ...http.access import caller_in
from ...http.bodies import body_in, parsed
from ...http.exchange import Answer, Exchange, deadline_of, ids_in, silence_of, until
from ..answer import Choice, gather, relaxed_header, usage, written
from ..generations import calls_of, together
from ..stream import Stream
from .answer import ChatChunks, Logprobs, chat_completion
from .request import parse


class Chats(Exchange):
    """The method as an ASGI application."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def _serve(self, request: Request, answer: Answer) -> None:
        endpoint = self._endpoint
        deadline, silence = deadline_of(request), silence_of(request, endpoint.settings.comment_seconds)
        ids = ids_in(request)
        body = body_in(request.scope)
        name = f"chatcmpl-{secrets.token_hex(12)}"
        with endpoint.arrivals.coming():
            parse_body = partial(parse, max_samples=endpoint.settings.max_prompts, defaults=endpoint.defaults)
            asked = await parsed(body, parse_body, endpoint.large, caller_in(request.scope))
            calls = await calls_of(asked, name, endpoint, request, deadline)
        choices = [Choice() for _ in range(asked.each)]
        more = relaxed_header(calls[0].left_out)
        numbered = len(calls) == 1 and (asked.detaches if ids is None else ids)
        model = asked.samples[0].request.model or endpoint.name
        asked.samples.clear()  # long prompts need memory, and the calls have them until the pool does
        logprobs = Logprobs(endpoint.spell, endpoint.token_bytes) if asked.logprobs else None
        async with together(calls, body.held) as events, until(deadline):
            if asked.stream:
                chunks = ChatChunks(name, model, asked.usage_in, numbered, logprobs)
                stream = Stream(answer, chunks, silence, more)
                await stream.write(events, choices, name)
                await stream.end(counted(choices) if asked.usage_in.end else None)
            else:
                headers = await gather(events, choices, name, asked.logprobs, more)

                def write() -> Response:
                    whole = chat_completion(name, model, choices, usage(*counted(choices)), logprobs)
                    return JSONResponse(whole, headers=headers)

                await answer.whole(await written(choices, write))


def counted(choices: list[Choice]) -> tuple[int, int, int]:
    """Tokens of the prompt, counted once, of all that was generated for it, and of the prompt's that were cached."""
    first = choices[0]
    return first.input_tokens, sum(choice.output_tokens for choice in choices), first.cached_tokens
