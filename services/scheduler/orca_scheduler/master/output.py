"""An engine master's claimed requests: their records, and their tokens on the way to the pool."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from orca.v1.pool_pb2 import PoolRequest
from orca_common.block_keys import Chain
from orca_common.scores import NOTHING, TOP, size_of_tops
from orca_pool.records import Claimed, CommitRow, Committed, Reason
from orca_pool.wire import TOKEN, commit_row, pack_tokens

from ..core.core import Member
from .ngrams import LOOKS_BACK, Ngrams

log = logging.getLogger(__name__)

MISSES = 8  # after which a text is looked at for drafts a token later than before


@dataclass(slots=True, eq=False)
class Held:
    """A claimed request. `tokens` are all its generated tokens in the pool's form; `acked` of them are committed.

    `tops` and `prompt` are what was asked for beyond them, in the form of orca_common.scores. Those of the tokens that
    were committed before this claim are in the pool alone.
    """

    claimed: Claimed
    record: PoolRequest
    deadline: float | None  # on the loop's clock
    tokens: bytearray
    acked: int
    finish: Reason | None = None
    tops: bytearray = field(default_factory=bytearray)  # of the tokens from index len(claimed.tokens) on
    prompt: bytearray = field(default_factory=bytearray)
    cached: int = 0  # tokens of the prompt behind whose keys and values it began
    top_size: int = 0  # bytes that the tops of one token take; 0: they were not asked for
    chain: Chain | None = None  # of its tokens, where the policy shares blocks
    ngrams: Ngrams | None = None  # of its text, where drafts come from there: of its prompt, and of
    read: int = 0  # generated tokens
    misses: int = 0  # how often in a row there was no draft in it
    looks: int = 0  # it is looked at again with this number of generated tokens
    offered: tuple[int, ...] = ()  # the drafts that were found last: tokens that may follow those at that time
    handed: bytes = b""  # where its keys and values are, for the engine that goes on with it

    def unacked(self) -> CommitRow:
        """The row of a commit with the tokens that the pool does not have yet."""
        acked, size = self.acked, self.top_size
        tokens, tops = bytes(self.tokens[acked * TOKEN.size :]), b""
        if size:
            mine = (acked - len(self.claimed.tokens)) * size
            # Below 0 the pool has lost tokens of an earlier claim, which nobody has the tops of.
            tops = bytes(NOTHING * (-mine // TOP.size) + self.tops[max(mine, 0) :])
        prompt, cached = (b"", 0) if acked else (bytes(self.prompt), self.cached)
        claimed = self.claimed
        said = self.finish, tops, prompt, cached, self.handed
        return commit_row((claimed.request_id, claimed.claim, acked, tokens, *said))

    def keys(self, root: str, block_size: int) -> tuple[str, ...]:
        """The root and the keys of its full blocks. From now on its chain has those of further ones."""
        self.chain = Chain(root, block_size)
        return root, *self.chain.extend([*self.record.prompt_ids, *self.token_ids()])

    def offer(self, tokens: Sequence[int], most: int) -> int:
        """Finds up to `most` tokens that may follow its text and these tokens, which it has just made. How many."""
        known = len(self.tokens) // TOKEN.size
        ngrams = self.ngrams = self.ngrams or Ngrams(self.record.prompt_ids)
        ngrams.extend(tokens if self.read == known else [*self.token_ids(self.read), *tokens])
        self.read = self.looks = known + len(tokens)
        self.offered = ngrams.drafts(most)
        if self.offered:
            self.misses = 0
        else:
            self.misses += 1
            self.looks += min(self.misses // MISSES, 3)
        return len(self.offered)

    def token_ids(self, first: int = 0) -> list[int]:
        """The ids of its generated tokens, from the one with this index on."""
        return [token_id for token_id, _, _ in TOKEN.iter_unpack(self.tokens[first * TOKEN.size :])]

    def text(self) -> list[list[int]]:
        """The token ids of its prompt and of its answer so far. Only readers that may see prompts get them."""
        return [list(self.record.prompt_ids), self.token_ids()]


def new_tokens(rows: Sequence[CommitRow], answers: Sequence[int]) -> int:
    """The tokens that the pool has since a commit. A row may be a repetition of one whose answer was lost."""
    went_well, size = Committed.OK, TOKEN.size
    return sum(
        len(row.tokens) // size if answer == went_well else max(answer - row.base, 0)
        for row, answer in zip(rows, answers, strict=True)
    )


class Outputs:
    """The held requests by claim number. Rows for the pool are gathered here until the next commit takes them."""

    def __init__(self) -> None:
        self.held: dict[int, Held] = {}
        self.dirty: dict[int, Held] = {}  # with something that no commit carries yet
        self.pressing = False  # among it what waits for no other: a first token, an end, a hand-over, or a row put back

    def add(self, claimed: Claimed, now: float) -> bool:
        """Takes a claimed request; one that is held already stays as it is. Whether its record can be read.

        One that cannot be read ends INTERNAL with the next commit: every engine that claims it would fail alike.
        """
        if claimed.claim in self.held:
            return True
        deadline = None if claimed.deadline_in is None else now + claimed.deadline_in
        tokens = bytearray(pack_tokens(claimed.tokens))
        held = Held(claimed, PoolRequest(), deadline, tokens, len(claimed.tokens))
        self.held[claimed.claim] = held
        try:
            held.record.ParseFromString(claimed.record)
            held.top_size = size_of_tops(held.record.sampling)
        except DecodeError:
            log.error("unreadable request", extra={"request": claimed.request_id})
            self.append(claimed.claim, b"", Reason.INTERNAL)
            return False
        return True

    def of(self, claims: Iterable[int]) -> list[Held]:
        """The held requests of these claims, without those that are gone."""
        return [self.held[claim] for claim in claims if claim in self.held]

    def admitted(self, claim: int, start: int) -> Held:
        """The request goes to the ranks, which begin with position `start`."""
        held = self.held[claim]
        if not held.tokens:  # otherwise the ranks do not score it again, and the pool knows how it began
            held.prompt.clear()
            held.cached = start
        return held

    def offers(self, claims: Iterable[int], made: Sequence[Sequence[int]], most: int) -> tuple[int, ...]:
        """How many drafts there are, up to `most` each, for requests that have just made these tokens; empty: none for
        any. A request that is gone gets none, and one that has made nothing keeps its own.

        Texts are read when drafts are wanted, one long text a call beside short ones: that may take 3 ms, and an
        iteration waits for it. A text without drafts is looked at less and less often, down to each fourth token.
        """
        offers, left = list[int](), LOOKS_BACK
        for claim, tokens in zip(claims, made, strict=True):
            held, found = self.held.get(claim), 0
            if held is not None and tokens and (known := len(held.tokens) // TOKEN.size) >= held.looks:
                unread = known - held.read if held.ngrams else known + len(held.record.prompt_ids)
                if unread <= left or left > LOOKS_BACK // 2:
                    left -= unread
                    found = held.offer(tokens, most)
            offers.append(found)
        return tuple(offers) if any(offers) else ()

    def drafts(self, members: Iterable[Member]) -> list[int]:
        """The tokens of these members' drafts, one after the other."""
        drafted = [member for member in members if member.outputs > 1]
        return [token for member in drafted for token in self.held[member.claim].offered[: member.drafts]]

    def keys(self, claims: Iterable[int], made: Sequence[Sequence[int]]) -> tuple[tuple[int, str], ...]:
        """The blocks that are full by the tokens which requests have just made: the claim, and the key."""
        keys = list[tuple[int, str]]()
        for claim, tokens in zip(claims, made, strict=True):
            held = self.held.get(claim)
            if held is not None and (chain := held.chain) is not None and (full := chain.extend(tokens)):
                keys += [(claim, key) for key in full]
        return tuple(keys)

    def scored(self, claim: int, prompt: bytes) -> None:
        """The logprobs of a part of the request's prompt, behind those of the part before."""
        held = self.held.get(claim)
        if held is not None:
            held.prompt += prompt

    def append(self, claim: int, token: bytes, finish: Reason | None, tops: bytes = b"") -> None:
        """A request's new token (its 16 bytes, or none), or its end, or both. An unknown claim is gone: no effect.

        tops: of the token, where they were asked for.
        """
        held = self.held.get(claim)
        if held is not None:
            self.pressing = self.pressing or not held.tokens or finish is not None
            held.tokens += token
            if token:
                held.tops += tops
            held.finish = finish
            self.dirty[claim] = held

    def hand_over(self, claim: int, handed: bytes) -> None:
        """With the next commit the request is another engine's, which finds its keys and values there."""
        held = self.held.get(claim)
        if held is not None:
            held.handed = handed
            self.dirty[claim], self.pressing = held, True

    def drop(self, claim: int) -> None:
        """The request is no longer this engine's."""
        self.held.pop(claim, None)
        self.dirty.pop(claim, None)

    def take(self) -> list[CommitRow]:
        """The rows of the next commit: what each request has beyond the pool's count."""
        rows = [held.unacked() for held in self.dirty.values()]
        self.dirty.clear()
        self.pressing = False
        return rows

    def unanswered(self, rows: list[CommitRow]) -> None:
        """Notes that a commit's outcome is unknown: the next one names the same base, and its answer settles it."""
        self.dirty |= {row.claim: self.held[row.claim] for row in rows if row.claim in self.held}

    def answered(self, rows: list[CommitRow], answers: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Applies the pool's answers. Returns the claims that are gone, those whose ends the pool has now, and those
        that it has handed over."""
        gone, ended, was_gone, went_well = list[int](), list[int](), Committed.GONE, Committed.OK
        handed = list[int]()
        for row, answer in zip(rows, answers, strict=True):
            held = self.held.get(row.claim)
            if held is None:
                continue
            if answer == was_gone:
                gone.append(row.claim)
            elif answer == went_well:
                held.acked = row.base + len(row.tokens) // TOKEN.size
                if row.finish is not None:
                    ended.append(row.claim)
                    self.drop(row.claim)
                elif row.handed:
                    handed.append(row.claim)
                    self.drop(row.claim)
            else:  # the pool has another count: this was a repetition, or Redis lost the end of the tokens
                held.acked = answer
                self.dirty[row.claim], self.pressing = held, True
        return gone, ended, handed
