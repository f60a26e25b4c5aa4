"""The form that a request gives its answer: a JSON schema, a regular expression or a grammar, by llguidance.

An endpoint compiles a form before it takes the request, and a process beside the rank that samples compiles it again,
by the same tokenizer and limits: a form that the endpoint accepts does not fail at the start of its answer. A matcher
says which tokens may come next. This depends on the form and the tokens so far alone.

llguidance is imported with the first request that asks for a form. Its errors are never raised: a matcher that has one
keeps it for good. It may hold Python's lock for seconds, so no process that serves others calls it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .bounded_file import read_bounded
from .checkpoint import TOKENIZER_BYTES, Checkpoint
from .errors import OrcaError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

EXCERPT = re.compile(r"\s*([0-9]+ \|.*|\^+)?")  # a line of an error that shows the form again
# Between the parts of JSON: a space, or a line break with an indent. Without a bound some models write nothing else. A
# schema may ask for another one: {"x-guidance": {"whitespace_pattern": ..}}.
WHITESPACE = r" |\n {0,40}"
# Without u: a member that a schema names has one spelling, and no other one escapes its schema. So characters that JSON
# can only spell as \uXXXX, such as U+0001, are in no answer.
JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": WHITESPACE, "json_allowed_escapes": 'nrbtf\\"'}
TRIED = 8  # tokens of answers that a form is tried with before it is taken
TOO_COMPLEX = ("ParserTooComplex", "LexerTooComplex")  # why a matcher stopped, in llguidance's words
SAID = 500  # characters of what the library says about a form
# Bounds of one form: its size, the work of compiling it, the work of one mask, and its memory (1 to 2 kB a state). They
# bound no time: 50,000 items took 0.1 to 29 s, and consuming a token has no bound.
LIMITS = {
    "max_grammar_size": 100_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}


class FormError(Exception):
    """A form that cannot be compiled or followed; the sentence is llguidance's."""


def as_grammar(kind: str, text: str) -> str:
    """The form in the language that `Forms` compiles. kind: a name of `sampling.FORMS`."""
    from llguidance import LLMatcher

    match kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case _:
            return LLMatcher.grammar_from_lark(text)


class Forms:
    """Compiles forms for one model."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._file, self._vocab_size = checkpoint.tokenizer_file, checkpoint.vocab_size
        self._eos = checkpoint.eos_token_ids
        self._tokenizer: LLTokenizer | None = None

    def open(self) -> None:
        """Reads the tokenizer, unless that was done. Raises FormError when this model's answers can have no form."""
        if self._tokenizer is None:
            self._tokenizer = self._opened()

    def token(self, name: str) -> int | None:
        """The token that a grammar must name by its id, since llguidance gives it no text; None for a plain text."""
        assert self._tokenizer is not None
        ids = self._tokenizer.tokenize_str(name, parse_special=True)
        return ids[0] if len(ids) == 1 and self._tokenizer.is_special_token(ids[0]) else None

    def check(self, grammar: str) -> None:
        """Compiles a form and follows two answers for `TRIED` tokens. Raises FormError when that is too much work.

        One has the first tokens of the vocabulary that are allowed, the other one the last ones.
        """
        beginning = self.matcher(grammar)
        ends = sum(1 << end for end in self._eos)
        for last in (False, True):
            with panics("follow the form"):
                matcher = beginning.deep_copy()
                for _ in range(TRIED):
                    allowed = int.from_bytes(matcher.compute_bitmask(), "little") & ~ends
                    if matcher.is_stopped() or not allowed:
                        break
                    matcher.consume_token((allowed if last else allowed & -allowed).bit_length() - 1)
            if matcher.stop_reason() in TOO_COMPLEX:
                check(matcher)

    def begins(self, grammar: str, text: str) -> bool:
        """Whether an answer of a form, which was compiled before, may begin with a text."""
        matcher = self.matcher(grammar)
        assert self._tokenizer is not None
        ids = self._tokenizer.tokenize_str(text)
        return matcher.try_consume_tokens(ids) == len(ids)

    def matcher(self, grammar: str) -> LLMatcher:
        """Compiles a form. Returns a matcher at the beginning of an answer. Raises FormError.

        It has made its first mask: a copy's first mask then takes a tenth of the time of a fresh one's.
        """
        from llguidance import LLMatcher, LLParserLimits

        self.open()
        assert self._tokenizer is not None
        with panics("compile the form"):
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
            check(matcher)
            matcher.compute_bitmask()
            check(matcher)
        return matcher

    def _opened(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if self._file is None:
            raise FormError("this model has no tokenizer.json")
        return open_tokenizer(LLTokenizer, self._file, self._vocab_size, self._eos)


def open_tokenizer(make: type[LLTokenizer], file: Path, vocab_size: int, eos: Sequence[int]) -> LLTokenizer:
    """Raises FormError when llguidance cannot use this tokenizer, or the model has no token that ends an answer."""
    try:
        raw = read_bounded(file, TOKENIZER_BYTES).decode()
        known = make(raw).vocab_size
        ends = [i for i in eos if i < known]
        if not ends:
            raise FormError("this model's tokenizer has no end-of-sequence token, which ends such an answer")
        return make(raw, n_vocab=max(vocab_size, known), eos_token=ends)
    except (OSError, OrcaError, ValueError) as error:
        raise FormError(f"llguidance cannot use this model's tokenizer ({str(error)[:SAID]})") from None


def check(matcher: LLMatcher) -> None:
    """Raises FormError when a matcher has failed, now or before."""
    if matcher.is_error():
        lines = matcher.get_error().partition("<non-verbose/>")[0].splitlines()
        raise FormError(" ".join(line.strip() for line in lines if not EXCERPT.fullmatch(line))[:SAID])


@contextmanager
def panics(work: str) -> Iterator[None]:
    """Raises FormError where the library panics, which Python sees as a BaseException of a class without a name.

    work: for the sentence, what the library was to do.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise FormError(f"llguidance failed to {work}") from None
