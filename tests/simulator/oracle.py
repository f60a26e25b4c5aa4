"""What an undisturbed run makes of a request: its next token is a function of the weights and all tokens before."""

import struct
import zlib
from collections.abc import Sequence

VOCABULARY = 64
END = 0  # a request that has it as an end token ends with it
POISON = 1000  # a prompt that begins with it ends the rank that runs it
MODELS = {"first": 0, "second": 0x9E3779B9}  # weights, and the state before the first token


def state_of(ids: Sequence[int], state: int = 0) -> int:
    """The state of the modelled model after these tokens."""
    return zlib.crc32(struct.pack(f"<{len(ids)}I", *ids), state)


def sample(state: int) -> int:
    """The next token."""
    return (state >> 8) % VOCABULARY


def spell(token_id: int) -> str:
    """The text of a token: one character."""
    return chr(ord("0") + token_id)


def until(tokens: Sequence[int], stop: str) -> list[int]:
    """The tokens up to the one that completes the stop string for the first time; all where none does."""
    before, found, _ = "".join(map(spell, tokens)).partition(stop)
    return list(tokens[: len(before) + len(found)])


class Letters:
    """A vocabulary in which each token is one character, for the endpoints: they look for stop strings."""

    follows = False

    def detokenizer(self, marks: tuple[str, ...] = (), before: Sequence[int] = ()) -> "Letters":
        return self

    def push(self, token_id: int) -> str:
        return spell(token_id)

    def flush(self) -> str:
        return ""


class Oracle:
    """The right tokens of every request of a run, by each model."""

    def __init__(self) -> None:
        self._tokens: dict[str, list[list[int]]] = {}

    def add(self, request_id: str, prompt: Sequence[int], count: int, ends: bool) -> list[list[int]]:
        """A new request. ends: the token `END` ends it. Returns its tokens, those of the first model first."""
        self._tokens[request_id] = [_tokens(prompt, count, ends, begin) for begin in MODELS.values()]
        return self._tokens[request_id]

    def made(self, request_id: str, tokens: Sequence[int]) -> bool:
        """Whether these are the first tokens that one of the models makes."""
        return any(list(tokens) == right[: len(tokens)] for right in self._tokens[request_id])


def _tokens(prompt: Sequence[int], count: int, ends: bool, begin: int) -> list[int]:
    state, tokens = state_of(prompt, begin), list[int]()
    while len(tokens) < count and not (ends and tokens[-1:] == [END]):
        tokens.append(sample(state))
        state = state_of(tokens[-1:], state)
    return tokens
