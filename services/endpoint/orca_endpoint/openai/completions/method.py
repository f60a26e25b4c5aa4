"""`POST /v1/completions`: from the body to the last byte of the answer."""

import secrets
from collections.abc import Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from orca_pool.records import Reason

from ...calls.endpoint import Endpoint
from ...calls.events import Event, Finished, Token
from ...http.access import caller_in
from ...http.bodies import body_in, parsed
from ...http.exchange import Answer, Exchange, deadline_of, ids_in, silence_of, until
from ..answer import Choice, Numbered, gather, relaxed_header, usage, written
from ..generations import calls_of, release, together, turn
from ..stream import Stream
from .answer import CompletionChunks, Logprobs, completion
from .request import Completion, parse


class Completions(Exchange):
    """The method as an ASGI application."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def _serve(self, request: Request, answer: Answer) -> None:
        endpoint = self._endpoint
        deadline, silence = deadline_of(request), silence_of(request, endpoint.settings.comment_seconds)
        ids = ids_in(request)
        body = body_in(request.scope)
        name = f"cmpl-{secrets.token_hex(12)}"
        with endpoint.arrivals.coming():
            parse_body = partial(parse, max_samples=endpoint.settings.max_prompts, defaults=endpoint.defaults)
            asked = await parsed(body, parse_body, endpoint.large, caller_in(request.scope))
            calls = await calls_of(asked, name, endpoint, request, deadline)
        more = relaxed_header(calls[0].left_out)
        numbered = len(calls) == 1 and (asked.detaches if ids is None else ids)
        model = asked.samples[0].request.model or endpoint.name
        logprobs = Logprobs(endpoint.spell) if asked.logprobs is not None else None
        async with together(calls, body.held) as came, until(deadline):
            choices = await self._choices(asked)
            asked.samples.clear()  # long prompts need memory, and the calls have them until the pool does
            events = without_tokens(came) if asked.only_prompt else came
            if asked.stream:
                chunks = CompletionChunks(name, model, asked.usage_in, numbered, logprobs)
                stream = Stream(answer, chunks, silence, more)
                await stream.write(events, choices, name)
                await stream.end(counted(choices, asked.each) if asked.usage_in.end else None)
            else:
                keep = logprobs is not None or asked.each > asked.n
                headers = await gather(events, choices, name, keep, more)
                shown, counts = best(choices, asked.n, asked.each), usage(*counted(choices, asked.each))

                def write() -> Response:
                    return JSONResponse(completion(name, model, shown, counts, logprobs), headers=headers)

                await answer.whole(await written(choices, write))
                release(choices, shown)

    async def _choices(self, asked: Completion) -> list[Choice]:
        """A choice for each generation. The text of an echoed prompt is as it was given, or its tokens'."""
        choices = list[Choice]()
        for n, prompt in enumerate(asked.prompts):
            await turn(n)
            echoed = None
            if asked.echo:
                echoed = prompt if isinstance(prompt, str) else "".join(self._endpoint.texts(prompt.ids))
            choices += [Choice(echoed) for _ in range(asked.each)]
        return choices


async def without_tokens(events: Numbered) -> Numbered:
    """Leaves out the one token that every request makes, where the prompt alone is wanted."""
    async for n, piece in events:
        kept: list[Event] = [event for event in piece if not isinstance(event, Token)]
        if kept and isinstance(end := kept[-1], Finished) and end.reason is not Reason.CANCELLED:
            kept[-1] = Finished(Reason.LENGTH, 0, "", end.times)
        if kept:
            yield n, kept


def best(choices: Sequence[Choice], n: int, each: int) -> list[Choice]:
    """The n choices of each prompt, of its `each`: those with the highest mean logprob, the best first."""
    if each == n:
        return list(choices)
    shown: list[Choice] = []
    for first in range(0, len(choices), each):
        of_prompt = sorted(choices[first : first + each], key=lambda choice: -choice.mean_logprob)
        shown += of_prompt[:n]
    return shown


def counted(choices: Sequence[Choice], each: int) -> tuple[int, int, int]:
    """Tokens of the prompts, each counted once, of all that was generated for them, and of the prompts' cached ones."""
    firsts = choices[::each]
    cached = sum(c.cached_tokens for c in firsts)
    return sum(c.input_tokens for c in firsts), sum(c.output_tokens for c in choices), cached
