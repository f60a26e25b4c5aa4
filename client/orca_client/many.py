"""Many prompts at once, with bounded concurrency: the answers in order, or as they come.

Pure: the clients (`client.py`, `aio.py`) run the prompts, this decides which one starts and which answer is next.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import InvalidArgument, OrcaError
from .events import Finished, Token

INTERVAL = 16  # tokens of a message: no reader follows it, and a stream that breaks has lost little

Message = Mapping[str, Any]  # role, content, and name, tool_call_id or tool_calls
Prompt = str | Sequence[int] | Sequence[Message]  # text, token ids, or the messages of a chat
Progress = Callable[[int, int | None], None]  # gets how many prompts have ended, and of how many (None: not known)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one of many prompts, or the error that it ended with."""

    position: int  # of the prompt, from 0
    prompt: Prompt
    request_id: str
    text: str  # whole; "" after an error
    tokens: Sequence[Token]
    finished: Finished | None  # None after an error
    error: OrcaError | None


class Many:
    """The prompts that have not started, and the answers that were not given out."""

    def __init__(
        self, prompts: Iterable[Prompt], concurrency: int, in_order: bool, progress: Progress | None = None
    ) -> None:
        """concurrency: prompts that run at once. Raises InvalidArgument."""
        if concurrency < 1:
            raise InvalidArgument(f"concurrency: must be at least 1; it is {concurrency}", "concurrency")
        if isinstance(prompts, str | bytes):
            raise InvalidArgument("prompts: must be several prompts, not one", "prompts")
        self.total = len(prompts) if isinstance(prompts, Sequence) else None
        self._prompts = enumerate(prompts)
        self._concurrency, self._in_order, self._progress = concurrency, in_order, progress
        self._running = self._ended = self._given = 0
        self._answers: dict[int, Answer] = {}  # not given out yet

    def start(self) -> Iterator[tuple[int, Prompt]]:
        """The prompts to start now, each with its position. None come when nothing is left."""
        while self._running < self._concurrency:
            item = next(self._prompts, None)
            if item is None:
                return
            self._running += 1
            yield item

    @property
    def running(self) -> int:
        """Prompts that have started and not ended."""
        return self._running

    def end(self, answer: Answer) -> Iterator[Answer]:
        """A prompt has ended. The answers to give out now."""
        self._running -= 1
        self._ended += 1
        if self._progress is not None:
            self._progress(self._ended, self.total)
        if not self._in_order:
            yield answer
            return
        self._answers[answer.position] = answer
        while self._given in self._answers:
            yield self._answers.pop(self._given)
            self._given += 1
