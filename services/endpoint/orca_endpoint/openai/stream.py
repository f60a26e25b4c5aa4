"""A completion as server-sent events, from its beginning or from where an earlier stream broke."""

from collections.abc import Sequence

from orca_common.errors import Cancelled
from orca_pool.records import Reason

from ..calls.events import Accepted, Event, Finished, Prompted, Token
from ..http.exchange import Answer
from .answer import Choice, Chunks, Logprobs
from .merged import Numbered


class CompletionStream:
    """Writes events as chunks. Tokens that are there together are one chunk.

    logprobs: None when no chunk has any. only_prompt: the generated tokens are not shown.
    """

    def __init__(self, answer: Answer, chunks: Chunks, logprobs: Logprobs | None, only_prompt: bool = False) -> None:
        self._answer, self._chunks, self._logprobs, self._only_prompt = answer, chunks, logprobs, only_prompt

    async def write(self, events: Numbered, choices: Sequence[Choice], name: str) -> None:
        """Sends headers with the first event, so that a refusal has its own status. Raises Cancelled."""
        async for n, piece in events:
            choice, first = choices[n], piece[0]
            sent = b""
            if isinstance(first, Accepted):
                choice.input_tokens = first.input_tokens
                if not self._answer.started:
                    await self._answer.start_stream(queue_headers(first))
                if self._logprobs is None:
                    sent = self._chunks.text(n, choice, choice.echoed or "", None)
            sent += self._tokens(n, choice, piece)
            if isinstance(last := piece[-1], Finished):
                check_whole(last, name)
                if self._only_prompt:
                    last = Finished(Reason.LENGTH, 0, "", last.times)
                choice.output_tokens = last.output_tokens
                sent += self._chunks.finished(n, choice, last)
            if sent:
                await self._answer.write(sent)

    async def end(self, usage: tuple[int, int] | None) -> None:
        """usage: tokens of the prompts and of the completions, where they are asked for."""
        if usage is not None:
            await self._answer.write(self._chunks.usage(*usage))
        await self._answer.write(b"data: [DONE]\n\n")
        await self._answer.end()

    def _tokens(self, n: int, choice: Choice, piece: Sequence[Event]) -> bytes:
        """The chunk of the tokens in a piece, after that of an echoed prompt with its logprobs."""
        sent, logprobs = b"", self._logprobs
        if logprobs is not None and choice.echoed is not None:
            for event in piece:
                if isinstance(event, Prompted):
                    sent = self._chunks.text(n, choice, choice.echoed, logprobs.of(event.tokens, 0))
        tokens = [event for event in piece if type(event) is Token]
        if not tokens or self._only_prompt:
            return sent
        choice.shown_tokens = tokens[-1].at + 1
        shows = logprobs is not None and tokens[0].logprob is not None
        of_tokens = logprobs.of(tokens, choice.offset) if shows and logprobs is not None else None
        return sent + self._chunks.text(n, choice, "".join([token.text for token in tokens]), of_tokens)


def queue_headers(accepted: Accepted) -> dict[str, str]:
    """Where a request stands when it is accepted: requests before it, and seconds until it begins, if that is known."""
    headers = {"X-Queue-Position": str(accepted.queue_position)}
    if accepted.starts_in is not None:
        headers["X-Queue-Seconds"] = f"{accepted.starts_in:.1f}"
    return headers


def check_whole(event: Finished, name: str) -> None:
    """Raises Cancelled for a request that was cancelled: OpenAI has no finish_reason for a part of an answer."""
    if event.reason is Reason.CANCELLED:
        raise Cancelled(f"request {name} was cancelled")
