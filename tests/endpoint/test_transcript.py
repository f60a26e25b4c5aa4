"""The transcript of a call, without a pool: whatever arrives in whatever order, the client sees one exact stream."""

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from endpoint.harness import make_tokenizer
from endpoint.test_text import cut
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from properties import examples
from tokenizers import Tokenizer

from orca.v1.pool_pb2 import PoolRequest
from orca.v1.sampling_pb2 import SamplingParams
from orca_common.errors import Aborted, Cancelled, DataLoss, DeadlineExceeded, FailedPrecondition, Internal, OrcaError
from orca_common.scores import TOP
from orca_endpoint.calls.events import Accepted, Event, Finished, Token
from orca_endpoint.calls.transcript import Transcript
from orca_endpoint.text.vocabulary import Vocabulary
from orca_pool.records import Attached, CommittedToken, Finish, Packet, Reason, Times

NAME, ATTEMPT, TIMES = "one", 7, Times(1, 2, 3, 4)
TOKENIZER = make_tokenizer()
# Tokens that make stop strings likely: letters, a space, and the two bytes of `é` apart, so that characters break.
LETTERS = [i for name in ("a", "b", "Ġ", "Ã", "©") if (i := TOKENIZER.token_to_id(name)) is not None]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return TOKENIZER


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    path = tmp_path_factory.mktemp("transcript") / "tokenizer.json"
    tokenizer.save(str(path))
    return Vocabulary(path)


@dataclass(frozen=True)
class Request:
    """A request as the pool may come to hold it, and what the pool would say of it."""

    ids: tuple[int, ...]  # all tokens that engines make of it
    engines: tuple[tuple[int, str], ...] = ((0, "engine-0"),)
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    reason: Reason = Reason.LENGTH
    top: int = 0  # most probable tokens that come with each token

    def tops(self, first: int, end: int) -> bytes:
        """As the pool has them: token n's are the ids n and n + 1."""
        return b"".join(TOP.pack(n + k, -k / 4) for n in range(first, end) for k in range(self.top))

    @property
    def tokens(self) -> list[CommittedToken]:
        return [CommittedToken(i, -n / 8 if self.logprobs else math.nan, 100 + n) for n, i in enumerate(self.ids)]

    def engine(self, index: int) -> str:
        return [name for first, name in self.engines if first <= index][-1]

    def finish(self, count: int) -> Finish | None:
        """The pool knows the end together with the last token."""
        return Finish(self.reason, len(self.ids), TIMES) if count == len(self.ids) else None

    def answer(self, count: int, known: int = 0, last: CommittedToken | None = None) -> Attached:
        """What an attach answers when `count` tokens are committed, and the call has `known`."""
        asked = SamplingParams(logprobs=self.logprobs, top_logprobs=self.top)
        record = PoolRequest(request_id=NAME, prompt_ids=[1, 2, 3], stop=self.stop, sampling=asked)
        engines = [(first, name) for first, name in self.engines if first < max(count, 1)]
        first = known if 0 < known <= count and self.tokens[known - 1] == last else 0
        content = b"" if known else record.SerializeToString()
        tops = self.tops(first, count)
        return Attached(content, 0, self.tokens[first:count], engines, self.finish(count), first, tops=tops)

    def packet(self, first: int, length: int) -> Packet:
        """At most `length` tokens of one engine, from index `first` on. With the last token comes the end."""
        end = min([first + length, len(self.ids), *(start for start, _ in self.engines if start > first)])
        made = self.tokens[first:end]
        engine = self.engine(first) if made else ""
        tops = self.tops(first, first + len(made))
        return Packet(NAME, ATTEMPT, first, engine, made, self.finish(max(first, end)), tops)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    ids = tuple(draw(st.lists(st.sampled_from(LETTERS), min_size=1, max_size=24)))
    borders = sorted(draw(st.sets(st.integers(1, len(ids)), max_size=3)))
    engines = tuple((first, f"engine-{n}") for n, first in enumerate([0, *borders]) if first < len(ids))
    stop = tuple(draw(st.lists(st.text(alphabet="ab é", min_size=2, max_size=4), max_size=2)))
    reason = draw(st.sampled_from([Reason.LENGTH, Reason.EOS]))
    return Request(ids, engines, stop, draw(st.booleans()), reason, draw(st.integers(0, 2)))


Arrival = tuple[bool, int, int]  # an answer of an attach, or else a packet; its place in the stream; its length
ARRIVALS = st.lists(st.tuples(st.booleans(), st.integers(0, 24), st.integers(0, 8)), max_size=30)


def show(transcript: Transcript, request: Request, arrivals: Sequence[Arrival], from_index: int = 0) -> list[Event]:
    """What a client sees of a call that gets these answers and packets, and then an answer with everything."""
    events: list[Event] = []
    for attach, place, length in [*arrivals, (True, len(request.ids), 0)]:
        before, due = transcript.count, transcript.next
        if attach or due != "packet":
            count = min(place, len(request.ids))
            events += transcript.answer(request.answer(count, before, transcript.last))
            lost = count < max(before, from_index)
            assert (transcript.next == "heal") == lost, "the call waits while the pool holds too few tokens"
        else:
            first = min(place, len(request.ids))
            events += transcript.packet(request.packet(first, length))
            if first > before:
                assert (transcript.next, transcript.count) == ("attach", before), "nothing is shown after a gap"
        if transcript.next == "stop":
            events.append(transcript.stopped())
        if transcript.next == "end":
            return events
    raise AssertionError(f"the stream did not end; next is {transcript.next}")


def end_by_definition(request: Request, tokenizer: Tokenizer) -> tuple[int, str, Reason]:
    """The number of tokens, the text and the reason: decoded at once, cut at the first stop string."""
    for count in range(1, len(request.ids) + 1):
        text = cut(tokenizer.decode(list(request.ids[:count])), list(request.stop))
        if text is not None:
            return count, text, Reason.STOP
    return len(request.ids), tokenizer.decode(list(request.ids)), request.reason


@settings(max_examples=examples(600))
@given(request=requests(), arrivals=ARRIVALS)
def test_any_arrivals(vocabulary: Vocabulary, tokenizer: Tokenizer, request: Request, arrivals: list[Arrival]) -> None:
    """Gaps, repetitions, overlaps and lost tokens: one Accepted, each index once and in order, one Finished."""
    events = show(Transcript(NAME, vocabulary), request, arrivals)
    count, text, reason = end_by_definition(request, tokenizer)
    accepted, *tokens, finished = events
    assert accepted == Accepted(NAME, 3, 0)
    shown = [token for token in tokens if isinstance(token, Token)]
    assert shown == tokens
    assert [token.at for token in shown] == list(range(count))
    assert [token.token_id for token in shown] == list(request.ids[:count])
    assert [token.iteration for token in shown] == [100 + n for n in range(count)]
    assert [token.engine for token in shown] == [request.engine(n) for n in range(count)]
    assert [token.logprob for token in shown] == [-n / 8 if request.logprobs else None for n in range(count)]
    assert [[(top.token_id, top.logprob) for top in token.top] for token in shown] == [
        [(n + k, -k / 4) for k in range(request.top)] for n in range(count)
    ]
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.output_tokens) == (reason, count)
    assert "".join(token.text for token in shown) + finished.text == text


@settings(max_examples=examples(300))
@given(request=requests(), arrivals=ARRIVALS, from_index=st.integers(0, 24), digest=st.booleans())
def test_from_an_index(
    vocabulary: Vocabulary, request: Request, arrivals: list[Arrival], from_index: int, digest: bool
) -> None:
    """A resumed stream is the tail of the whole one, texts included, wherever characters and stop strings began."""
    whole = show(Transcript(NAME, vocabulary), request, [])
    from_index = min(from_index, len(whole) - 2)
    seen = digest_by_definition(request.ids[:from_index]) if digest else b""
    transcript = Transcript(NAME, vocabulary, from_index=from_index, digest=seen)
    assert show(transcript, request, arrivals, from_index) == [whole[0], *whole[1 + from_index :]]


@settings(max_examples=examples(300))
@given(request=requests().map(lambda request: replace(request, top=0)), data=st.data())
def test_a_changed_token(request: Request, data: st.DataObject) -> None:
    """DATA_LOSS, in a packet and in an answer, before anything of them is shown."""
    shown = data.draw(st.integers(1, len(request.ids)))
    place = data.draw(st.integers(0, shown - 1))
    transcript = Transcript(NAME, None)
    list(transcript.packet(request.packet(0, shown)._replace(finish=None)))
    shown = transcript.count  # a packet ends where the tokens of another engine begin
    assume(place < shown)
    assert transcript.digest() == digest_by_definition(request.ids[:shown])
    other = replace(request, ids=(*request.ids[:place], 300, *request.ids[place + 1 :]))
    first = data.draw(st.integers(max(n for n, _ in request.engines if n <= place), place))
    changed = transcript.packet(other.packet(first, len(other.ids)))
    if data.draw(st.booleans()):
        changed = transcript.answer(replace(other.answer(len(other.ids)), finish=None))
        assert isinstance(next(changed), Accepted)
    with pytest.raises(DataLoss, match="have changed"):
        next(changed)
    assert transcript.count == shown
    assert transcript.next != "end", "the call detaches"


@settings(max_examples=examples(200))
@given(request=requests(), from_index=st.integers(0, 24), seen=st.lists(st.sampled_from(LETTERS), max_size=24))
def test_a_digest_of_other_tokens(request: Request, from_index: int, seen: list[int]) -> None:
    from_index = min(from_index, len(request.ids))
    assume(tuple(seen) != request.ids[:from_index])
    transcript = Transcript(NAME, None, from_index=from_index, digest=digest_by_definition(seen))
    events = transcript.answer(request.answer(len(request.ids)))
    assert isinstance(next(events), Accepted)
    with pytest.raises(DataLoss, match=f"its first {from_index} tokens are not those that were seen"):
        next(events)


def digest_by_definition(ids: Sequence[int]) -> bytes:
    return hashlib.sha1(struct.pack(f"<{len(ids)}I", *ids)).digest()


def test_a_stop_string_that_the_last_token_completes(vocabulary: Vocabulary) -> None:
    """The stop string ends the stream, not the length, and is not shown."""
    a, b = LETTERS[:2]
    transcript, request = Transcript(NAME, vocabulary), Request((a, a, b), stop=("ab",))
    list(transcript.answer(request.answer(1)))
    (held, last) = transcript.packet(request.packet(1, 2))
    assert isinstance(held, Token)
    assert isinstance(last, Token)
    assert (held.text, last.text, transcript.next) == ("a", "", "stop")
    assert transcript.stopped() == Finished(Reason.STOP, 3, "", None, stop="ab")
    assert transcript.next == "end"


def test_a_token_without_a_logprob() -> None:
    """The pool holds NaN for a logprob that was not computed; clients see none."""
    request = Request((5, 6), logprobs=True)
    attached = request.answer(2)
    attached.tokens[1] = attached.tokens[1]._replace(logprob=math.nan)
    _, first, second, _ = Transcript(NAME, None).answer(attached)
    assert isinstance(first, Token)
    assert isinstance(second, Token)
    assert (first.logprob, second.logprob) == (0, None)


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (Reason.DEADLINE, DeadlineExceeded),
        (Reason.DETACHED, Cancelled),
        (Reason.INTERNAL, Internal),
        (Reason.NOT_FINITE, Internal),
        (Reason.NEVER_FITS, FailedPrecondition),
        (Reason.MODEL_CHANGED, Aborted),
        (Reason.STUCK, FailedPrecondition),
    ],
)
def test_ends_that_are_errors(reason: Reason, error: type[OrcaError]) -> None:
    """They come after all tokens; then there is nothing to detach."""
    transcript, request = Transcript(NAME, None), Request((5, 6), reason=reason)
    assert len(list(transcript.answer(request.answer(1)))) == 2
    assert not list(transcript.packet(request.packet(2, 0)))
    assert transcript.next == "attach", "the token before the end is missing"
    events = transcript.answer(request.answer(2))
    assert isinstance(next(events), Token)
    with pytest.raises(error, match=NAME):
        next(events)
    assert transcript.next == "end"
    assert transcript.finished is None


def test_nothing_is_shown_after_a_gap() -> None:
    transcript, request = Transcript(NAME, None), Request((5, 6, 7, 8))
    list(transcript.answer(request.answer(1)))
    assert not list(transcript.packet(request.packet(2, 1)))
    assert (transcript.next, transcript.count) == ("attach", 1)


@pytest.mark.parametrize("shown", [0, 2])
def test_a_newer_call(shown: int) -> None:
    """ABORTED ends the older call at once, whatever it has shown."""
    transcript = Transcript(NAME, None)
    list(transcript.answer(Request((5, 6, 7)).answer(shown)))
    with pytest.raises(Aborted):
        list(transcript.packet(Packet(NAME, ATTEMPT, 0, "", [], Finish(Reason.ABORTED, 0, TIMES))))
    assert transcript.next == "end"


def test_an_end_with_fewer_tokens_than_were_shown() -> None:
    """DATA_LOSS: nobody makes the lost tokens again. At a stop string's end the call waits first."""
    transcript, request = Transcript(NAME, None), Request((5, 6, 7))
    list(transcript.answer(Request((5, 6, 7, 8)).answer(3)))
    short = replace(request.answer(2), finish=Finish(Reason.STOP, 2, TIMES))
    assert not list(transcript.answer(short))
    assert transcript.next == "heal"
    with pytest.raises(DataLoss, match="fewer tokens than were shown"):
        list(transcript.answer(replace(short, finish=Finish(Reason.CANCELLED, 2, TIMES))))


def test_a_from_index_beyond_the_pool() -> None:
    """The error does not say that tokens were shown: they may never have been."""
    transcript = Transcript(NAME, None, from_index=5)
    list(transcript.answer(Request((5, 6, 7)).answer(2)))
    assert transcript.next == "heal"
    assert "fewer tokens than the 5 that were seen" in str(transcript.lost(unknown=False))


def test_engines_after_the_end() -> None:
    """A stop string may be found after several engines made more tokens, which are void: the pool still names them."""
    engines = [(0, "engine-0"), (4, "engine-1"), (5, "engine-2")]
    attached = replace(Request((5, 6, 7)).answer(3), engines=engines, finish=Finish(Reason.STOP, 3, TIMES))
    transcript = Transcript(NAME, None)
    events = list(transcript.answer(attached))
    assert [type(event) for event in events] == [Accepted, Token, Token, Token, Finished]
    assert transcript.next == "end"


def test_the_pool_lost_tokens_of_an_ended_request() -> None:
    """The call waits, within the bound of a healing; it does not attach again and again."""
    transcript = Transcript(NAME, None)
    attached = replace(Request((5, 6, 7)).answer(2), finish=Finish(Reason.LENGTH, 3, TIMES))
    assert [type(event) for event in transcript.answer(attached)] == [Accepted, Token, Token]
    assert transcript.next == "heal"
