"""What an undisturbed run makes of a request: its next token is a function of all tokens before."""

import struct
import zlib
from collections.abc import Sequence

VOCABULARY = 64
END = 0  # a request that has it as an end token ends with it


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
    """The tokens up to the one that completes the stop string for the first time."""
    text = "".join(map(spell, tokens))
    return list(tokens[: text.index(stop) + len(stop)])


class Letters:
    """A vocabulary in which each token is one character, for the endpoints: they look for stop strings."""

    def detokenizer(self) -> "Letters":
        return self

    def push(self, token_id: int) -> str:
        return spell(token_id)

    def flush(self) -> str:
        return ""


class Oracle:
    """The right tokens of every request of a run."""

    def __init__(self) -> None:
        self._tokens: dict[str, list[int]] = {}

    def add(self, request_id: str, prompt: Sequence[int], count: int, ends: bool) -> list[int]:
        """A new request. ends: the token `END` ends it. Returns its tokens."""
        state, tokens = state_of(prompt), list[int]()
        while len(tokens) < count and not (ends and tokens[-1:] == [END]):
            tokens.append(sample(state))
            state = state_of(tokens[-1:], state)
        self._tokens[request_id] = tokens
        return tokens

    def tokens(self, request_id: str) -> list[int]:
        return self._tokens[request_id]
