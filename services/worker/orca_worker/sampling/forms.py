"""Which tokens may follow in the answers of requests that ask for a form, worked out while the layers run.

A mask depends on the request's form and on its committed tokens alone. So a request that starts again after a
recovery, as an initiation of both, goes on with the same masks. A form that cannot be followed any further ends its
request, never the iteration. llguidance's compiler and matchers work without Python's lock.
"""

import logging
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLMatcher

from orca_common.checkpoint import Checkpoint
from orca_common.forms import FormError, Forms, check, panics

from ..iteration.batch import Batch

log = logging.getLogger(__name__)


class Answer:
    """`rows.Constraint`: the answer of one request so far, against its form."""

    def __init__(self, forms: Forms, grammar: str, vocab_size: int) -> None:
        self._forms, self._grammar, self._vocab_size = forms, grammar, vocab_size
        self._matcher: LLMatcher | None = None
        self._read = 0  # tokens of the answer that the matcher has
        self._mask: Future[np.ndarray | None] | None = None

    def begin(self, thread: ThreadPoolExecutor, tokens: np.ndarray) -> None:
        """Starts on the mask of the next token. tokens: [n], the whole answer so far."""
        self._mask = thread.submit(self._follow, tokens)

    def allowed(self, end: int) -> np.ndarray | None:
        """Waits for the mask, [V] bool. None: no token can follow."""
        return self._mask.result() if self._mask is not None else None

    def _follow(self, tokens: np.ndarray) -> np.ndarray | None:
        try:
            with panics("follow the form"):
                if self._matcher is None:
                    self._matcher = self._forms.matcher(self._grammar)
                matcher = self._matcher
                if not matcher.is_stopped():  # otherwise the answer has ended, and an iteration was sent ahead
                    matcher.consume_tokens(tokens[self._read :].tolist())
                    self._read = len(tokens)
                bits = matcher.compute_bitmask()
                check(matcher)
        except FormError as error:
            log.warning("a form cannot be followed: its request ends", extra={"tokens": len(tokens), "why": str(error)})
            return None
        return np.unpackbits(np.frombuffer(bits, np.uint8), count=self._vocab_size, bitorder="little").view(bool)


class Masks:
    """Fills the masks of this rank's requests, in a thread of its own."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._forms, self._vocab_size = Forms(checkpoint), checkpoint.vocab_size
        self._thread = ThreadPoolExecutor(1, "masks")

    def begin(self, batch: Batch) -> None:
        """Starts on the masks of a batch's next tokens."""
        ends = batch.draws + batch.requests["prompt"]  # as `adjust` has them
        for n, one in batch.adjusted.items():
            if one.asked.grammar:
                answer = one.answer
                if not isinstance(answer, Answer):
                    one.answer = answer = Answer(self._forms, one.asked.grammar, self._vocab_size)
                answer.begin(self._thread, one.tokens[one.prompt : int(ends[n])])
