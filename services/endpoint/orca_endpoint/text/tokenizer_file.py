"""Opens a stranger's tokenizer.json, and keeps what the tokenizer library may do to a process in bounds.

The library is Rust. Where it panics, Python gets a BaseException, which `except Exception` lets pass: an event loop
would lose a call without a word.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from orca_common.bounded_file import SHOWN, json_object, read_bounded
from orca_common.checkpoint import LARGEST, TOKENIZER_BYTES
from orca_common.errors import FailedPrecondition, Internal

from .native_stderr import STANDARD_ERROR

EXPANSION = 64  # how much longer a normalizer or a decoder may make a text; NFKD alone makes it 18 times as long


def open_tokenizer(path: Path, added: Sequence[AddedToken] = ()) -> Tokenizer:
    """Opens a tokenizer, and adds tokens that it lacks.

    Raises FailedPrecondition with a sentence when the file is no tokenizer, or a dangerous one."""
    try:
        raw = read_bounded(path, TOKENIZER_BYTES)
    except FileNotFoundError:
        raise FailedPrecondition(f"model: {path} is not there any more") from None
    parts = json_object(raw, path)
    for part in ("normalizer", "decoder"):
        if expansion(parts.get(part)) > EXPANSION:
            problem = f"its {part} may make a text more than {EXPANSION} times as long"
            raise FailedPrecondition(f"model: {path} is refused: {problem}")
    try:
        with STANDARD_ERROR.closed():
            tokenizer = Tokenizer.from_str(raw.decode())
    except BaseException as error:  # the library raises Exception itself, and panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise FailedPrecondition(f"model: {path} is not a tokenizer ({str(error)[:SHOWN]})") from None
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= LARGEST:
        raise FailedPrecondition(f"model: {path} has a token {largest}; ids are below {LARGEST}")
    known = tokenizer.get_vocab(with_added_tokens=True)
    tokenizer.add_tokens([token for token in added if token.content not in known])
    tokenizer.no_truncation()  # a checkpoint's file may ask for both, which would silently change prompts
    tokenizer.no_padding()
    return tokenizer


def expansion(part: Any) -> float:
    """The number of characters that a normalizer or decoder may make of one, by its replacements.

    A sequence multiplies what its parts do. An empty match or a pattern of one character is taken for a replacement.
    """
    if not isinstance(part, dict):
        return 1.0
    product = 1.0
    for name in ("normalizers", "decoders"):
        inner = part.get(name)
        product *= prod(map(expansion, inner)) if isinstance(inner, list) else 1.0
    if part.get("type") == "Replace":
        content, pattern = part.get("content"), part.get("pattern")
        string = pattern.get("String") if isinstance(pattern, dict) else None
        matched = len(string) if isinstance(string, str) and string else 1
        empty = matched == 1  # a regular expression may match between characters too
        product *= max(1.0, len(content) / matched + empty) if isinstance(content, str) else 1.0
    prepend = part.get("prepend")
    if part.get("type") == "Prepend" and isinstance(prepend, str):
        product *= 1 + len(prepend)  # each part of the text may get one
    return product


@contextmanager
def panics(what: str) -> Iterator[None]:
    """Makes an error of what the library raises. Raises Internal, whose sentence says what the library was to do.

    Not what the library says of it: that may quote the prompt, which belongs into no log and no other caller's error.
    """
    try:
        with STANDARD_ERROR.closed():
            yield
    except BaseException as error:
        if not is_panic(error) and type(error) is not Exception:  # its errors, as of a missing unknown token, are bare
            raise
        raise Internal(f"the tokenizer library failed to {what} ({type(error).__name__})") from None


def is_panic(error: BaseException) -> bool:
    """Whether Rust panicked. The class cannot be imported."""
    return type(error).__name__ == "PanicException"
