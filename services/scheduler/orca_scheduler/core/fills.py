"""Fills iterations in other ways than Algorithm 1 as it stands: even batches, and prompts in parts.

Sources: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (2403.02310) for
`stall_free`; Holmes et al., "DeepSpeed-FastGen" (2401.08671) for `split_fuse`. All keep the paper's order: first come,
first served.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain

from .memory import Memory
from .request import Request
from .selection import Limits, Plan, Stop

UNBOUNDED = 1 << 62  # positions

Fill = Callable[[Iterable[Request], Sequence[Request], Limits, Memory], Plan]


class Filling:
    """A batch that is being filled: each request that is offered takes as many positions as its bounds allow."""

    def __init__(self, live: Sequence[Request], limits: Limits, memory: Memory) -> None:
        self._live, self._limits, self._memory = live, limits, memory
        self._batch: list[tuple[Request, int]] = []
        self._preempt: dict[Request, int] = {}  # with the slots that become free
        self._left = UNBOUNDED if limits.positions is None else limits.positions
        self._free = memory.free
        self._stop = Stop.POOL
        self._blocked = False

    def offer(self, request: Request, count: int) -> int:
        """Returns how many of its next `count` positions the request runs."""
        if request in self._preempt:
            return 0
        if len(self._batch) == self._limits.max_bs:
            self._stop = Stop.BATCH_FULL
            return 0
        if not self._left:
            self._stop = Stop.POSITIONS
            return 0
        count = min(count, self._left)
        if not self._has_slots(request, count):
            return 0
        self._left -= count
        self._batch.append((request, count))
        return count

    def offer_all(self, requests: Iterable[Request]) -> None:
        """Offers each request all its positions. Those whose blocks hold them, as nearly all increments', take no more
        than a look at these numbers."""
        batch, most, preempted = self._batch, self._limits.max_bs, self._preempt
        for request in requests:
            known = request.known
            count = known - request.computed
            if known <= request.holds and count <= self._left and len(batch) < most and not preempted:
                self._left -= count
                batch.append((request, count))
            else:
                self.offer(request, count)

    def _has_slots(self, request: Request, count: int) -> bool:
        """Takes the slots that the request needs. Where they are not there, no request begins behind it."""
        need, begins = self._memory.need(request, count), request.row is None
        if not need:
            return True
        if begins and self._blocked:
            return False
        alone = not self._batch and not self._memory.reserved
        lacking = need + (self._memory.spare if begins and not alone else 0) - self._free
        if lacking > 0 and not begins:
            left = [other for other in self._live if other not in self._preempt]
            beginning = [other for other, _ in self._batch if other.row is None]
            victims = self._memory.victims(request, lacking, left, beginning)
            self._preempt |= victims
            self._free += sum(victims.values())
            self._blocked = True
        if need > self._free or (begins and lacking > 0):
            self._blocked, self._stop = True, Stop.SLOTS
            return False
        self._free -= need
        return True

    def plan(self) -> Plan:
        return Plan(tuple(self._batch), self._stop, tuple(self._preempt) if self._batch else ())


def first_come(ready: Iterable[Request], live: Sequence[Request], limits: Limits, memory: Memory) -> Plan:
    """Algorithm 1's selection, for a memory in which rows grow."""
    filling = Filling(live, limits, memory)
    for request in ready:
        filling.offer(request, request.remaining)
    return filling.plan()


def even(ready: Iterable[Request], live: Sequence[Request], limits: Limits, memory: Memory) -> Plan:
    """The same, and a batch has at most its share of the requests that can run: the batches of a pipeline are alike.

    Otherwise the first one takes up to `max_bs` of them, and the others have what is left.
    """
    running, free = sum(request.row is not None and request.goes_on for request in live), memory.free - memory.spare
    for request in live:
        if request.row is None:
            free -= memory.need(request, request.remaining)
            if free < 0:
                break
            running += 1
    share = max(-(-running // limits.n_workers), 1)
    plan = first_come(ready, live, replace(limits, max_bs=min(limits.max_bs, share)), memory)
    shared = plan.stop == Stop.BATCH_FULL and share < limits.max_bs
    return replace(plan, stop=Stop.SHARE) if shared else plan


def stall_free(ready: Iterable[Request], live: Sequence[Request], limits: Limits, memory: Memory) -> Plan:
    """Increments first, so that no prompt holds one up; then prompts that have begun, then new ones, in parts that fill
    the iteration's positions. Of two prompts the earlier one ends its initiation no later."""
    return _in_parts(ready, live, limits, memory, in_turn=True)


def split_fuse(ready: Iterable[Request], live: Sequence[Request], limits: Limits, memory: Memory) -> Plan:
    """The same, and an iteration has all its positions whenever there is work for them: a prompt may end its initiation
    while a part of an earlier one is in flight. Without a pipeline none ever is."""
    return _in_parts(ready, live, limits, memory, in_turn=False)


def _in_parts(ready: Iterable[Request], live: Sequence[Request], limits: Limits, memory: Memory, in_turn: bool) -> Plan:
    filling, at_hand, places = Filling(live, limits, memory), set(ready), limits.places
    # Those in their last iteration have no place any more, and those that are pulled no initiation.
    # (`goes_on`, of which a call takes 0.1 us a row)
    live = [r for r in live if not r.ended and r.known < r.arrived.max_tokens and not r.elsewhere]
    behind, begins = False, True  # behind: the initiation of an earlier prompt goes on after this iteration
    for part in (live[:places], live[places:]):  # those without a place gave way, and have what is left
        filling.offer_all([request for request in part if request.initiated and request in at_hand])
        others = [request for request in part if not request.initiated]
        begun = (request for request in others if request.row is not None)
        new = (request for request in others if request.row is None) if begins else ()
        for request in chain(begun, new):
            count = request.remaining - 1 if behind and in_turn else request.remaining
            if not count and request.row is None:
                begins = False
                break  # those behind it would have begun, and go on before it
            runs = filling.offer(request, count) if request in at_hand and count else 0
            has_begun = runs > 0 or request.row is not None
            if has_begun and runs < request.remaining:
                behind = True
    return filling.plan()


FILLS: dict[str, Fill] = {"paper": first_come, "even": even, "stall-free": stall_free, "split-fuse": split_fuse}
IN_PARTS = frozenset(("stall-free", "split-fuse"))
