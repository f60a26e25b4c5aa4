"""Text to tokens, and tokens to text one at a time: no half characters, and stop strings across token borders."""

import json
import re
from collections.abc import Callable, Collection, Sequence
from encodings.utf_8 import IncrementalDecoder
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from orca_common.errors import FailedPrecondition

from .tokenizer_file import open_tokenizer, panics
from .tokenizer_folder import TokenizerFolder

BROKEN = "\ufffd"  # what a decoder writes for bytes that make no character
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # a token for one byte, as SentencePiece names it
WINDOW = 16  # tokens; a longer run without a whole character is given out as it is


class Detokenizer(Protocol):
    """Turns the tokens of one stream into text. The results of `push`, and of `flush` at the end, make up the text."""

    def push(self, token_id: int) -> str:
        """The characters that this token completed."""
        ...

    def flush(self) -> str:
        """The text that was held back: an unfinished character, as U+FFFD."""
        ...


class Vocabulary:
    """A model's tokenizer. Special tokens have no text."""

    def __init__(self, path: Path, follows: bool = True) -> None:
        """follows: an answer goes on from its prompt, as with every model that has no encoder.

        Raises FailedPrecondition when the file is no tokenizer."""
        self.follows = follows
        self._path, folder = path, TokenizerFolder(path.parent)
        self._tokenizer = open_tokenizer(path, folder.added)
        self.end = self._tokenizer.token_to_id(folder.named.get("eos_token", ""))  # None: the folder names none
        parts = json.loads(self._tokenizer.to_str())
        self._pieces: list[bytes] | None = None  # without the special tokens' texts
        self._spelled: list[bytes] = []  # with them
        if (parts["decoder"] or {}).get("type") == "ByteLevel":
            self._spelled = self._byte_pieces()
            special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
            self._pieces = [b"" if i in special else piece for i, piece in enumerate(self._spelled)]
        self._marked: dict[tuple[str, ...], list[bytes]] = {}  # `_pieces` with the texts of some special tokens
        self._flags = {t.content: t for t in self._tokenizer.get_added_tokens_decoder().values() if t.special}
        self._special = {t.content: i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}
        self._plain: Tokenizer | None = None  # to which special tokens are text; made when it is needed
        self._falls_back = '"ByteFallback"' in json.dumps(parts["decoder"])  # to tokens of single bytes
        # Bytes of the longest token: a text of n bytes has at least n / longest_token tokens. None: not certain here.
        exact = self._pieces is not None and parts["normalizer"] is None
        names = self._tokenizer.get_vocab(with_added_tokens=True)
        self.longest_token = max(len(name.encode()) for name in names) if exact and names else None

    def check_fits(self, tokens: int) -> None:
        """Raises FailedPrecondition when a text may have a token that a model of `tokens` tokens does not.

        Tokens that were added to a vocabulary may lie beyond: a plain text has none of them.
        """
        largest = max(self._tokenizer.get_vocab(with_added_tokens=False).values(), default=0)
        if largest >= tokens:
            problem = f"has a token {largest}, and the model {tokens} tokens (vocab_size): it is another model's"
            raise FailedPrecondition(f"model: {self._path} {problem}")

    def special_in(self, text: str) -> tuple[int | None, str | None]:
        """The special token that a text is, or else the text of one that it holds; None: of neither kind."""
        found = self._special.get(text)
        return found, None if found is not None else next((one for one in self._special if one in text), None)

    @property
    def special_tokens(self) -> Sequence[str]:
        """The texts of the special tokens."""
        return list(self._special)

    def special_but(self, ends: Collection[int]) -> tuple[str, ...]:
        """The texts of the special tokens without those that end an answer."""
        return tuple(name for name, i in self._special.items() if i not in ends)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids. About half a second for 1 MiB of text, without the interpreter's lock.

        special: with the tokens that the tokenizer puts around every prompt.
        """
        with panics("encode the text"):
            return self._tokenizer.encode(text, add_special_tokens=special).ids

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Token ids of a text in which a mark within the name of a special token says that it is text and no token.

        Marks are no part of the text. The tokenizer, too, cuts at special tokens before it does anything else.
        """
        if self._plain is None:
            with panics("read the tokenizer"):
                plain = Tokenizer.from_str(self._tokenizer.to_str())
            plain.encode_special_tokens = True  # as text
            self._plain = plain
        names = sorted(self._special, key=len, reverse=True)
        ids, strip = list[int](), False
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text)
        for n in range(0, len(parts), 2):
            token = self._flags[parts[n + 1]] if n + 1 < len(parts) else None
            part = parts[n].replace(mark, "")
            part = part.lstrip() if strip else part
            part = part.rstrip() if token is not None and token.lstrip else part
            with panics("encode the text"):
                ids += self._plain.encode(part, add_special_tokens=False).ids if part else []
            if token is not None:
                ids.append(self._special[token.content])
                strip = token.rstrip
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        with panics("decode tokens"):
            return self._tokenizer.decode(ids, skip_special_tokens=True)

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token of a prompt: the characters that it completed. Special tokens have theirs here."""
        spelled = self._pieces is not None
        detokenizer = ByteDetokenizer(self._spelled) if spelled else WindowDetokenizer(self._decode_all)
        texts = [detokenizer.push(i) for i in ids]
        if texts:
            texts[-1] += detokenizer.flush()
        return texts

    def spell(self, token_id: int) -> str:
        """The text of one token alone. A part of a character is spelled as OpenAI does: "bytes:\\xe6\\x9d"."""
        piece = self.token_bytes(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token alone, which may be a part of a character."""
        if self._pieces is not None:
            return self._spelled[token_id] if token_id < len(self._spelled) else b""
        byte = BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or "")
        if byte is not None and self._falls_back:
            return bytes.fromhex(byte[1])
        alone = self._decode_all([token_id])  # decoders treat the first token of a text differently, so it comes second
        return (self._decode_all([token_id, token_id])[len(alone) :] or alone).encode()

    def _decode_all(self, ids: Sequence[int]) -> str:
        with panics("decode tokens"):
            return self._tokenizer.decode(ids, skip_special_tokens=False)

    def detokenizer(self, marks: tuple[str, ...] = (), before: Sequence[int] = ()) -> Detokenizer:
        """Makes the text of one stream. marks: special tokens that have a text in it. before: the tokens that it
        follows, the last of which decide whether its first word has a space."""
        if self._pieces is None:
            return WindowDetokenizer(self._decode_with(marks) if marks else self.decode, before[-WINDOW:])
        return ByteDetokenizer(self._with(self._pieces, marks) if marks else self._pieces)

    def _with(self, pieces: list[bytes], marks: tuple[str, ...]) -> list[bytes]:
        found = self._marked.get(marks)
        if found is None:
            shown = {i for mark in marks if (i := self._tokenizer.token_to_id(mark)) is not None}
            found = [self._spelled[i] if i in shown else piece for i, piece in enumerate(pieces)]
            self._marked[marks] = found
        return found

    def _decode_with(self, marks: tuple[str, ...]) -> Callable[[Sequence[int]], str]:
        special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        hidden = special - {self._tokenizer.token_to_id(mark) for mark in marks}
        return lambda ids: self._decode_all([i for i in ids if i not in hidden])

    def _byte_pieces(self) -> list[bytes]:
        """The bytes of each token of a byte-level vocabulary. Its names spell each byte as a printable character."""
        kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        moved = [byte for byte in range(256) if byte not in kept]
        byte_of = {chr(byte): byte for byte in kept} | {chr(256 + n): byte for n, byte in enumerate(moved)}
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for name, i in vocabulary.items():
            spelled = all(character in byte_of for character in name)
            pieces[i] = bytes(byte_of[character] for character in name) if spelled else name.encode()
        return pieces


class ByteDetokenizer:
    """For byte-level vocabularies (GPT-2, Llama 3, Qwen): decodes the bytes of each token as UTF-8. 0.2 us a token."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decoder = IncrementalDecoder("replace")

    def push(self, token_id: int) -> str:
        # a model's vocabulary may be padded beyond its tokenizer's
        piece = self._pieces[token_id] if token_id < len(self._pieces) else b""
        return piece.decode() if piece.isascii() and not self._decoder.buffer else self._decoder.decode(piece)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For all other vocabularies: decodes a short window of tokens and gives out the text that the newest ones added.

    The window begins with the tokens of the previous piece, because a decoder may treat the first token of a text
    differently (the idea is text-generation-inference's prefix and read offsets). A piece that ends in U+FFFD is held
    back.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        """before: tokens whose text comes before this one. A character that is not whole there begins with it."""
        self._decode = decode
        self._window = list(before)
        self._prefix = decode(self._window) if before else ""  # the text of the tokens of the window that is given out
        if self._prefix.endswith(BROKEN):
            self._window, self._prefix = [], ""
        self._read = len(self._window)  # these tokens

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if len(self._window) - self._read < WINDOW and (text.endswith(BROKEN) or len(text) <= len(self._prefix)):
            return ""
        return self._give(text)

    def flush(self) -> str:
        return self._give(self._decode(self._window)) if self._window else ""

    def _give(self, text: str) -> str:
        # Where bytes of an unfinished character follow the bytes of others, a decoder may make all of them U+FFFD.
        joined = text.startswith(self._prefix)
        piece = text[len(self._prefix) :] if joined else self._decode(self._window[self._read :])
        del self._window[: self._read]
        self._read, self._prefix = len(self._window), self._decode(self._window)
        return piece


class NoDetokenizer:
    """For a model without a tokenizer: tokens have no text."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces, and holds back what may be the beginning of one.

    The stop string that is complete first ends the text, wherever the borders of the pieces lie. If several are
    complete at one character, the longest does. As in OpenAI's API, the stop string is not part of the text. Each stop
    string has one Knuth-Morris-Pratt state, so the cost is linear in the text, whatever the strings are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, self._failures(stop)) for stop in stops]
        self._states = [0] * len(stops)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._held = ""
        self.found: str | None = None  # the stop string that has ended the text

    def push(self, piece: str) -> tuple[str, bool]:
        """The text to give out, and whether a stop string is complete (then nothing follows)."""
        if not self._held and self._firsts.isdisjoint(piece):
            return piece, False
        text, states = self._held + piece, self._states
        for end, character in enumerate(piece, len(self._held) + 1):
            found = ""
            for n, (stop, failures) in enumerate(self._stops):
                state = states[n]
                while state and stop[state] != character:
                    state = failures[state - 1]
                state += stop[state] == character
                states[n] = state
                if state == len(stop):
                    found = max(found, stop, key=len)
            if found:
                self._held, self.found = "", found
                return text[: end - len(found)], True
        border = len(text) - max(states)
        self._held = text[border:]
        return text[:border], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _failures(stop: str) -> list[int]:
        """For each prefix of `stop`: the length of its longest proper suffix that is also a prefix of `stop`."""
        failures, state = [0], 0
        for character in stop[1:]:
            while state and stop[state] != character:
                state = failures[state - 1]
            state += stop[state] == character
            failures.append(state)
        return failures


class TextStream:
    """The text of one request from token 0 on: a detokenizer and a stop matcher together."""

    def __init__(
        self,
        vocabulary: Vocabulary | None,
        stops: Sequence[str],
        marks: tuple[str, ...] = (),
        before: Sequence[int] = (),
    ) -> None:
        """marks: special tokens that have a text. before: the prompt, where the text goes on from it."""
        self._detokenizer: Detokenizer = vocabulary.detokenizer(marks, before) if vocabulary else NoDetokenizer()
        self._matcher = StopMatcher(stops) if stops else None

    def push(self, token_id: int) -> tuple[str, bool]:
        """The text that this token gives out, and whether it completed a stop string."""
        piece = self._detokenizer.push(token_id)
        if self._matcher is None or not piece:
            return piece, False
        return self._matcher.push(piece)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that has ended the text."""
        return self._matcher.found if self._matcher is not None else None

    def flush(self) -> str:
        """The text that was held back, at the end of a request that no stop string ended."""
        held = self._matcher.flush() if self._matcher else ""
        return held + self._detokenizer.flush()
