"""`POST /v1/completions`: from the body to the last byte of the answer.

`request.py` reads the body, `answer.py` writes JSON, `stream.py` streams it; here are
the calls between them, one for each generation. Their requests are named by the completion's id, with which a stream
that breaks is taken up.
"""

import secrets
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse

from orca.v1.orca_pb2 import GenerateRequest

from ..calls.call import Call
from ..calls.events import Accepted, Finished, Prompted, Token
from ..http.access import tenant_in
from ..http.bodies import body_in, parsed
from ..http.exchange import Answer, Exchange, deadline_of, until
from ..http.request_ids import labels_in
from ..requests.validation import MAX_INTERVAL
from .answer import Choice, Chunks, Logprobs, completion, finish_reason, usage
from .merged import Merged, Numbered, Single
from .request import Completion, parse
from .stream import CompletionStream, check_whole, queue_headers


class Completions(Exchange):
    """The method as an ASGI application."""

    async def _serve(self, request: Request, answer: Answer) -> None:
        endpoint = self._endpoint
        deadline = deadline_of(request)
        body = body_in(request.scope)
        name = f"cmpl-{secrets.token_hex(12)}"
        with endpoint.arrivals.coming():
            wanted = await parsed(body, lambda raw: parse(raw, endpoint.settings.max_prompts), endpoint.large)
            calls = await self._calls(wanted, name, request, deadline)
        choices = [Choice(self._text_of(sample.request) if wanted.echo else None) for sample in wanted.samples]
        wanted.samples.clear()  # long prompts need memory, and the calls have them until the pool does
        opened = Single(calls[0], body.held) if len(calls) == 1 else Merged(calls, body.held)
        async with opened as events, until(deadline):
            if wanted.stream:
                chunks = Chunks(name, endpoint.name, wanted.include_usage, numbered=len(calls) == 1)
                stream = CompletionStream(answer, chunks, self._logprobs(wanted), wanted.only_prompt)
                await stream.write(events, choices, name)
                await stream.end(counted(choices, wanted.best_of) if wanted.include_usage else None)
            else:
                await self._whole(events, choices, wanted, name, answer)

    async def _calls(self, wanted: Completion, name: str, request: Request, deadline: float | None) -> list[Call]:
        """A call for each generation. None is left when one is refused, or the client leaves."""
        endpoint, carrier, tenant = self._endpoint, dict(request.headers), tenant_in(request.scope)
        calls: list[Call] = []
        try:
            for k, sample in enumerate(wanted.samples):
                sample.request.request_id = name if len(wanted.samples) == 1 else f"{name}-{k}"
                if not wanted.stream:
                    sample.request.stream_interval = MAX_INTERVAL
                # The generations of one prompt are tokenized once.
                encoded = calls[-1].prompt_ids if k % wanted.best_of else None
                call = await endpoint.generate(
                    sample.request, deadline, carrier, sample.names, tenant=tenant, encoded=encoded
                )
                call.label({**labels_in(request.scope), **wanted.labels})
                calls.append(call)
        except BaseException as error:
            for call in calls:
                call.drop(error)
            raise
        return calls

    async def _whole(
        self, events: Numbered, choices: list[Choice], wanted: Completion, name: str, answer: Answer
    ) -> None:
        keeps = wanted.logprobs is not None or wanted.best_of > wanted.n
        headers: dict[str, str] = {}
        async for k, piece in events:
            choice = choices[k]
            for event in piece:
                if isinstance(event, Token):
                    if not wanted.only_prompt:
                        choice.texts.append(event.text)
                        if keeps:
                            choice.tokens.append(event)
                elif isinstance(event, Accepted):
                    choice.input_tokens = event.input_tokens
                    headers = queue_headers(event)
                elif isinstance(event, Prompted):
                    choice.tokens += event.tokens
                else:
                    check_whole(event, name)
                    end(choice, event, wanted.only_prompt)
        shown = best(choices, wanted.n, wanted.best_of)
        counts = usage(*counted(choices, wanted.best_of))
        body = completion(name, self._endpoint.name, shown, counts, self._logprobs(wanted))
        await answer.whole(JSONResponse(body, headers=headers))

    def _logprobs(self, wanted: Completion) -> Logprobs | None:
        return Logprobs(self._endpoint.spell) if wanted.logprobs is not None else None

    def _text_of(self, request: GenerateRequest) -> str:
        """The text of a prompt: as it was given, or its tokens'."""
        if request.WhichOneof("prompt") == "text":
            return request.text
        return "".join(self._endpoint.texts(request.token_ids.ids))


def end(choice: Choice, event: Finished, only_prompt: bool) -> None:
    """The end of a choice that is not streamed."""
    if only_prompt:
        choice.finish = "length"
    else:
        choice.texts.append(event.text)
        choice.output_tokens, choice.finish = event.output_tokens, finish_reason(event.reason)


def best(choices: Sequence[Choice], n: int, best_of: int) -> list[Choice]:
    """The n choices of each prompt, of its `best_of`: those with the highest mean logprob, the best first."""
    if best_of == n:
        return list(choices)
    shown: list[Choice] = []
    for first in range(0, len(choices), best_of):
        of_prompt = sorted(choices[first : first + best_of], key=lambda choice: -choice.mean_logprob)
        shown += of_prompt[:n]
    return shown


def counted(choices: Sequence[Choice], best_of: int) -> tuple[int, int]:
    """Tokens of the prompts, each counted once, and of all that was generated for them."""
    return sum(c.input_tokens for c in choices[::best_of]), sum(c.output_tokens for c in choices)
