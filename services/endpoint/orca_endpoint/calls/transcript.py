"""The transcript of one call: the tokens of its request from 0 on, their text, and what the client is shown of them.

Pure: no I/O, no clock, no task. The call (`call.py`) gives the transcript every answer of an attach and every packet,
shows the events that come out, and then does what `next` says:

    answer | packet -> event* -> next

Tokens are matched and detokenized from 0, whatever index the client asked for: a stop string or a character may have
begun before it.
"""

import hashlib
import math
from array import array
from collections.abc import Iterator, Sequence
from typing import Literal

from orca.v1.pool_pb2 import PoolRequest
from orca_common.errors import DataLoss
from orca_common.scores import TOP, Top, unpack_prompt, unpack_tops
from orca_common.telemetry import trace_id_of
from orca_pool.records import Attached, CommittedToken, Finish, Packet, Reason, Times, adapter_name

from ..text.tool_calls import SYNTAXES, CallReader, Said
from ..text.vocabulary import TextStream, Vocabulary
from .events import Accepted, Event, Finished, Prompted, PromptToken, Token, TopToken
from .refusals import ambiguous_call, end_error

# What the call must do before the transcript can go on. Strings, because it is compared for each packet: Python 3.11
# takes 0.25 us to look up a member of an Enum.
Next = Literal[
    "attach",  # attach to the request: the answer holds all tokens so far, or all after `last`
    "packet",  # take the next packet
    "heal",  # wait, then attach again: the pool has lost tokens, and engines may make them again
    "stop",  # record the end that a stop string makes, then call `stopped`
    "end",  # nothing: the pool has ended the request for this call
]


class Transcript:
    """One request as one call shows it: each index at most once, in order, and only what the pool has committed.

    from_index: the first token that the client wants. digest: of the tokens before, as the client saw them; empty when
    the client did not send one (see `digest_of`).
    """

    def __init__(
        self, request_id: str, vocabulary: Vocabulary | None, *, from_index: int = 0, digest: bytes = b""
    ) -> None:
        self.request_id = request_id
        self.record = PoolRequest()  # empty until the first answer
        self.accepted = False
        self.next: Next = "attach"
        self.finished: Reason | None = None  # the end that the client was shown
        self.times: Times | None = None  # of a request that has ended
        self.prompt_tokens = 0
        self.characters_before = 0  # of the text before `from_index`, and of an echoed prompt
        self.last: CommittedToken | None = None  # token so far
        self._vocabulary = vocabulary
        self._from_index, self._digest = from_index, digest
        self._text = TextStream(None, ())
        self._calls: CallReader | None = None  # of an answer that may call functions
        self._ids = array("I")  # every token from 0
        self._top_count = 0  # most probable tokens that come with each token
        self._wants_prompt = False  # the client is still to be shown the prompt's logprobs

    @property
    def count(self) -> int:
        """Tokens so far, those before `from_index` included."""
        return len(self._ids)

    @property
    def unproven(self) -> tuple[int, bytes]:
        """Count and digest of the tokens that the client saw; the pool compares them before this call takes over."""
        return (0, b"") if self.accepted else (self._from_index, self._digest)

    @property
    def resumes(self) -> bool:
        """Whether the client was shown tokens by an earlier call."""
        return self._from_index > 0

    def answer(self, attached: Attached) -> Iterator[Event]:
        """Events that the answer of a submit or attach adds. Raises DataLoss, or the error that ended the request."""
        if not self.accepted:
            self.accepted = True
            self.record = PoolRequest.FromString(attached.record)
            syntax = SYNTAXES.get(self.record.tool_syntax)
            before = self.record.prompt_ids if self._vocabulary is not None and self._vocabulary.follows else ()
            marks = syntax.marks if syntax is not None else ()
            if self.record.show_special_tokens and self._vocabulary is not None:
                marks = self._vocabulary.special_but(self.record.end_token_ids)
            self._text = TextStream(self._vocabulary, self.record.stop, marks, before)
            self._calls = CallReader(syntax, self.request_id) if syntax is not None else None
            asked = self.record.sampling
            self._top_count = asked.top_logprobs
            self._wants_prompt = asked.prompt_logprobs and not self._from_index
            position = max(attached.position - 1, 0)
            self.prompt_tokens = len(self.record.prompt_ids)
            kept, starts_in = self.record.kept, attached.starts_in
            named = adapter_name(asked.adapter)
            yield Accepted(self.request_id, self.prompt_tokens, position, starts_in, attached.weights, kept, named)
            self.record.ClearField("kept")
            if asked.prompt_logprobs and self._from_index and self._vocabulary is not None:
                self.characters_before = sum(map(len, self._vocabulary.texts(list(self.record.prompt_ids))))
            if not self._wants_prompt:
                self.record.ClearField("prompt_ids")  # nobody needs them any more, and a call may live for long
        tokens, finish, known = attached.tokens, attached.finish, attached.first
        count = known + len(tokens)
        if count < max(len(self._ids), self._from_index):
            # A stop string's end may be recorded while tokens before it are lost and still to be made again: heal then.
            if finish is not None and finish.reason is not Reason.STOP:
                raise self.data_loss("it ended with fewer tokens than were shown")
            self.next = "heal"
            return
        self._check_digest(tokens)
        if self._wants_prompt and tokens:
            yield self._prompted(attached.prompt)
        self.next = "packet"
        top_size = self._top_count * TOP.size
        starts = [*(first for first, _ in attached.engines), count]
        for (first, engine), end in zip(attached.engines, starts[1:], strict=True):
            begin = max(first, known)
            # none where the request ended before the tokens of this engine, or the call has them
            if made := tokens[begin - known : max(end - known, 0)]:
                tops = attached.tops[(begin - known) * top_size : (end - known) * top_size] if top_size else b""
                yield from self._add(begin, engine, made, tops)
            if self.next != "packet":
                return
        if finish is not None:
            yield from self._end(finish, "heal")

    def packet(self, packet: Packet) -> Iterator[Event]:
        """The events that a packet adds: none after a gap. Raises DataLoss, or the error that ended the request."""
        if self._wants_prompt and packet.tokens:
            self.next = "attach"  # the prompt's logprobs are in its answer
            return iter(())
        self.next = "packet"
        tokens = self._add(packet.first, packet.engine, packet.tokens, packet.tops)
        return tokens if packet.finish is None else self._last(tokens, packet.finish)

    def stopped(self) -> Finished:
        """The end that a stop string makes, once the pool has recorded it. Its times are the pool's to tell.

        Raises FailedPrecondition for a call that parsers read differently."""
        self.next = "end"
        return self._finished(Reason.STOP, "", None)

    def digest(self) -> bytes:
        """The digest of all tokens so far."""
        return digest_of(self._ids)

    def data_loss(self, problem: str) -> DataLoss:
        return DataLoss(f"request {self.request_id}: {problem}")

    def lost(self, unknown: bool) -> DataLoss:
        """The error when the pool still lacks tokens, or the whole request, after the wait for them."""
        if unknown and not self.accepted:
            return self.data_loss("it is not known; it ended too long ago, was lost, or never was")
        if len(self._ids) < self._from_index:
            return self.data_loss(f"it has fewer tokens than the {self._from_index} that were seen")
        return self.data_loss("the pool lost tokens that were shown")

    def unseen(self) -> DataLoss:
        """The error of a client that saw other tokens than the pool has."""
        return self.data_loss(f"its first {self._from_index} tokens are not those that were seen")

    def changed(self) -> DataLoss:
        """The error of a committed token that is another one now."""
        return self.data_loss("tokens that were shown have changed")

    # -- the parts
    def _check_digest(self, tokens: Sequence[CommittedToken]) -> None:
        """Compares the tokens that the client has seen with the pool's, once."""
        if not self._digest:
            return
        seen = array("I", (token.token_id for token in tokens[: self._from_index]))
        if digest_of(seen) != self._digest:
            raise self.unseen()
        self._digest = b""

    def _add(self, first: int, engine: str, tokens: Sequence[CommittedToken], tops: bytes) -> Iterator[Token]:
        """The events of tokens from index `first` on. Sets `next` at a gap, and after a stop string."""
        ids = self._ids
        if first > len(ids):
            self.next = "attach"
            return
        known = len(ids) - first
        if known and any(token.token_id != i for token, i in zip(tokens, ids[first:], strict=False)):
            raise self.changed()
        logprobs = self.record.sampling.logprobs
        places = iter(unpack_tops(tops, self._top_count)[known:]) if tops else None
        push, new, calls = self._text.push, tuple.__new__, self._calls
        for token in tokens[known:] if known else tokens:
            token_id, logprob, iteration = self.last = token
            index = len(ids)
            ids.append(token_id)
            text, stopped = push(token_id)
            said = None if calls is None else calls.push(text)
            if stopped:
                self.next = "stop"
            if index >= self._from_index:
                shown = logprob if logprobs and not math.isnan(logprob) else None
                top = () if places is None else self._spelled(next(places))
                # Token(...) itself would take twice as long.
                yield new(Token, (index, token_id, text, shown, iteration, engine, top, said))
            else:
                self.characters_before += len(text)
                if places is not None:
                    next(places)
            if stopped:
                return

    def _spelled(self, top: Top) -> tuple[TopToken, ...]:
        """The most probable tokens at a place with their texts."""
        spell = self._vocabulary.spell if self._vocabulary is not None else lambda token_id: ""
        return tuple([TopToken(token_id, spell(token_id), logprob) for token_id, logprob in top])

    def _prompted(self, scores: bytes) -> Prompted:
        """The prompt's tokens with their logprobs. Raises DataLoss when the pool has lost them."""
        ids = list(self.record.prompt_ids)
        scored = unpack_prompt(scores, self._top_count)
        if len(scored) != len(ids):
            raise self.data_loss("the pool lost the logprobs of its prompt")
        self._wants_prompt = False
        texts = self._vocabulary.texts(ids) if self._vocabulary is not None else [""] * len(ids)
        self.characters_before = sum(map(len, texts))
        return Prompted(
            [
                PromptToken(token_id, text, logprob, self._spelled(top))
                for token_id, text, (logprob, top) in zip(ids, texts, scored, strict=True)
            ]
        )

    def _last(self, tokens: Iterator[Token], finish: Finish) -> Iterator[Event]:
        """The events of a packet that brings the end."""
        yield from tokens
        if self.next == "packet":
            yield from self._end(finish, "attach")

    def _end(self, finish: Finish, incomplete: Next) -> Iterator[Finished]:
        """The end of the stream, as an event or an error. Sets `next` to `incomplete` while tokens are missing."""
        if finish.output_tokens != len(self._ids) and finish.reason is not Reason.ABORTED:
            self.next = incomplete
            return
        self.next, self.times = "end", finish.times
        if finish.reason > Reason.CANCELLED:
            has_form = bool(self.record.sampling.grammar)
            raise end_error(finish.reason, self.request_id, trace_id_of(self.record.trace), has_form)
        yield self._finished(finish.reason, self._text.flush(), finish.times, finish.cached_tokens)

    def _finished(self, reason: Reason, text: str, times: Times | None, cached: int = 0) -> Finished:
        """The event of the end. text: what was held back. Raises FailedPrecondition for a call that parsers read
        differently, unless Cancel has ended the answer."""
        calls, stop = self._calls, self._text.stopped_by
        if calls is None:
            self.finished = reason
            return Finished(reason, len(self._ids), text, times, cached_tokens=cached, stop=stop)
        said, rest = calls.push(text), calls.flush()
        if calls.doubled is not None and reason is not Reason.CANCELLED:
            raise ambiguous_call(self.request_id, calls.doubled)
        self.finished = reason
        said = Said(said.content + rest.content, said.calls)
        return Finished(reason, len(self._ids), text, times, said, cached, calls.called, stop)


def digest_of(ids: "array[int]") -> bytes:
    """SHA-1 of token ids, each as 4 bytes little-endian (the order of every machine that this runs on)."""
    return hashlib.sha1(ids.tobytes()).digest()
