"""A rank's records of its requests besides keys and values, in arrays indexed by row."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import copy
from operator import attrgetter
from typing import Protocol

import numpy as np
from google.protobuf.unknown_fields import UnknownFieldSet

from orca.v1 import worker_pb2
from orca.v1.sampling_pb2 import SamplingParams
from orca_common.errors import FailedPrecondition

log = logging.getLogger(__name__)

MAX_ROWS = 1 << 20  # rows are small integers; a larger one is the sender's mistake

# The parameters of a plain draw, as SamplingParams names them. Any other one makes a row adjusted.
DRAW = [("temperature", "f8"), ("top_k", "i8"), ("top_p", "f8"), ("min_p", "f8"), ("seed", "u8"), ("logprobs", "?")]
NO_ADAPTER = -1
PLAIN = {name for name, _ in DRAW}
# forced_end adjusts one iteration alone; an adapter changes the logits, and not how a token is made of them.
UNADJUSTED = {*PLAIN, "forced_end", "adapter"}
columns = attrgetter(*(name for name, _ in DRAW))
GREEDY = columns(SamplingParams())

ROW = np.dtype(
    [
        ("held", "?"),
        ("claim", "u8"),
        ("length", "i8"),  # tokens whose key and value are in memory
        ("admitted", "i8"),  # input tokens that came with its admission
        ("prompt", "i8"),  # those of them that were not generated
        ("known", "i8"),  # input tokens that are known here
        ("last_token", "i8"),  # the last of those
        *DRAW,
        ("forced", "i8"),  # the output token of number `forced_at`, from 1 on
        ("forced_at", "i8"),  # 0: none
        ("adjusted", "?"),  # it has an entry in `Rows.adjusted`
        ("adapter", "i4"),  # its number among the rank's, from 0; -1: it has none
        ("likeliest", "?"),  # no more is wanted than the likeliest token: no draw, no logprobs, no adjustments
    ]
)


def is_newer(asked: SamplingParams) -> bool:
    """Whether an endpoint of a newer release has set a parameter that is not known here."""
    return any(len(UnknownFieldSet(one)) > 0 for one in (asked, asked.forced_end, asked.not_before))


class Constraint(Protocol):
    """Holds an answer to its form."""

    def allowed(self) -> np.ndarray | None:
        """The mask of the next token, [ceil(V / 8)] uint8, the first token in the lowest bit; 0: no token can follow.

        None: it is not there in time.
        """
        ...


class Adjusted:
    """A request's penalties, biases and form, beyond the plain draw, and the input tokens that they depend on."""

    def __init__(
        self, asked: SamplingParams, token_ids: Sequence[int], prompt: int, start_token: int | None = None
    ) -> None:
        """start_token: before the answer, where an encoder reads the prompt."""
        self.asked, self.prompt, self._start_token = asked, prompt, start_token
        self.scores_prompt = asked.prompt_logprobs and len(token_ids) == prompt  # not told before a recovery
        self.tokens = np.array(token_ids, np.int64)  # [at least the input tokens so far]
        self.bias_ids = np.array(sorted(asked.logit_bias), np.int64)
        self.biases = np.array([asked.logit_bias[i] for i in self.bias_ids.tolist()], np.float32)
        self.repetition = asked.repetition_penalty or 1.0
        penalties = asked.presence_penalty or asked.frequency_penalty or self.repetition != 1
        self.answer: Constraint | None = None  # from its first token on, on the rank that samples
        self.not_before = np.array(asked.not_before.token_ids, np.int64)
        self.changes_logits = bool(penalties or len(self.bias_ids) or asked.grammar or len(self.not_before))
        # No token can follow: the request ends. One that asks for what this release does not know begins so.
        self.stuck = is_newer(asked)
        self.waiting = False  # the mask of its next token was not there in time: it has none in this iteration
        self.forced: int | None = None  # the only token that may follow

    def behind_a_draft(self) -> Adjusted:
        """The same for a further output of an iteration. Its mask, where its answer has a form, is another one."""
        other = copy(self)
        other.answer, other.stuck = None, False
        return other

    def force(self, token_id: int) -> None:
        """Notes the request's next token."""
        self.forced, self.changes_logits = token_id, True

    def repeated(self, end: int) -> np.ndarray:
        """The tokens, of the first `end`, to which the repetition penalty applies: those that the decoder has read.

        A token may stand there more than once.
        """
        if self._start_token is None:
            return self.tokens[:end]
        return np.append(self.tokens[self.prompt : end], self._start_token)

    def put(self, position: int, token_ids: np.ndarray) -> None:
        """Input tokens from a position on."""
        end = position + len(token_ids)
        if end > len(self.tokens):
            self.tokens = np.append(self.tokens, np.zeros(end, np.int64))
        self.tokens[position:end] = token_ids


class Rows:
    """The requests that this rank holds. `table` [n] of ROW grows with the largest row."""

    def __init__(self, start_token: int | None = None, adapters: Sequence[str] = ()) -> None:
        """start_token: of a model with an encoder. adapters: the names of those that the rank begins with."""
        self._start_token = start_token
        self.adapters = {name: number for number, name in enumerate(adapters)}  # ids of loaded ones come to them
        self.table = np.zeros(64, ROW)
        self.adjusted: dict[int, Adjusted] = {}  # by row
        self.inputs: dict[int, np.ndarray] = {}  # by row: the admitted tokens, until they have run

    def admit(self, admission: worker_pb2.Admission) -> None:
        """Takes a request in, and forgets the one that had its row before. Raises FailedPrecondition."""
        row = admission.row
        if row >= MAX_ROWS:
            raise FailedPrecondition(f"row {row} is larger than any engine's rows")
        if row >= len(self.table):
            grown = np.zeros(max(row + 1, 2 * len(self.table)), ROW)
            grown[: len(self.table)] = self.table
            self.table = grown
        prompt = len(admission.token_ids) - admission.generated
        if prompt < 1:
            raise FailedPrecondition(f"row {row}: an admission needs at least one token that was not generated")
        asked, draw, forced, adjusted = admission.sampling, GREEDY, admission.sampling.forced_end, False
        adapter = self.adapters.get(asked.adapter, NO_ADAPTER)
        lacks = bool(asked.adapter) and adapter == NO_ADAPTER
        if admission.HasField("sampling"):
            draw = columns(asked)
            adjusted = not {field.name for field, _ in asked.ListFields()} <= UNADJUSTED or is_newer(asked) or lacks
        self.table[row] = (
            True,
            admission.claim,
            admission.computed,
            len(admission.token_ids),
            prompt,
            len(admission.token_ids),
            admission.token_ids[-1],
            *draw,
            forced.token_id,
            forced.max_new_tokens,
            adjusted,
            adapter,
            not (asked.temperature > 0 or asked.logprobs or adjusted),
        )
        self.inputs[row] = np.array(admission.token_ids, np.int64)
        self.adjusted.pop(row, None)
        if adjusted:
            self.adjusted[row] = Adjusted(asked, admission.token_ids, prompt, self._start_token)
            if lacks:
                self.adjusted[row].stuck = True
                log.error("an adapter is not served here: the request ends", extra={"claim": admission.claim})
            elif self.adjusted[row].stuck:
                log.error("a sampling parameter is not known here: the request ends", extra={"claim": admission.claim})

    def free(self, rows: Sequence[int]) -> None:
        """Forgets rows, whether they are held or not."""
        for row in rows:
            if row < len(self.table):
                self.table[row] = np.zeros((), ROW)
                self.adjusted.pop(row, None)
                self.inputs.pop(row, None)

    def advance(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Notes the lengths that `rows` [B] have after an iteration."""
        self.table["length"][rows] = lengths
        if self.inputs:
            behind = self.table["length"] >= self.table["admitted"]
            for row in [row for row in self.inputs if behind[row] and row not in self.adjusted]:
                del self.inputs[row]  # one that is adjusted may wait, and run its last position again

    def learn(self, rows: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> None:
        """The tokens [n] at `positions` [n] of `rows` [n], which are their last known ones."""
        self.table["known"][rows] = positions + 1
        self.table["last_token"][rows] = token_ids

    def still(self, rows: np.ndarray, claims: np.ndarray) -> np.ndarray:
        """-> [n] bool: the rows that still have the request that they had then."""
        return self.table["claim"][rows] == claims

    def clear(self) -> None:
        self.table = np.zeros(64, ROW)
        self.adjusted.clear()
        self.inputs.clear()

    def held(self) -> list[tuple[int, int, int]]:
        """(row, claim, length) of each request, by row. Any thread may call it.

        While an iteration runs, some rows may show it already and others not yet.
        """
        table = self.table.copy()
        rows = np.flatnonzero(table["held"])
        return [(int(row), int(table["claim"][row]), int(table["length"][row])) for row in rows]
