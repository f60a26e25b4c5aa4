"""Attention K/V memory in which a request has blocks for the positions that it has computed: paged attention.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (SOSP 2023),
with preemption by recomputation alone. Where blocks run out, the youngest request that waits gives up its row and
starts again, as the initiation of its prompt and its tokens.
"""

from collections.abc import Sequence

from .memory import Slots
from .request import Request

PREEMPTIONS = 3  # of a request; then it comes back with slots for all its tokens, and keeps them
SPARE = 0.05  # of the slots: closed to requests that begin while others run, which grow


class OnDemand(Slots):
    """A request begins with blocks for its prompt, and gets one more whenever an increment crosses a block."""

    grows = True

    @property
    def spare(self) -> int:
        return int(self.n_slots * SPARE)

    def need(self, request: Request, count: int) -> int:
        if request.row is None:
            return self.size(request) - self._held(request)
        held = len(self._rows[request.row]) * self.block_size
        return max(self._reservation.upfront(request.computed + count, 0) - held, 0)

    def size(self, request: Request) -> int:
        if request.preemptions >= PREEMPTIONS:
            return self.whole(request)
        return self._reservation.upfront(request.known, 0)

    def room(self, waiting: Sequence[Request], leaving: Sequence[int] = ()) -> int:
        return super().room(waiting, leaving) - (self.spare if len(self._rows) > len(leaving) else 0)

    def victims(
        self, request: Request, lacking: int, live: Sequence[Request], beginning: Sequence[Request]
    ) -> dict[Request, int]:
        younger = list[Request]()
        for other in reversed(live):
            if other is request:
                break
            if other.row is not None and not other.running and other.preemptions < PREEMPTIONS:
                younger.append(other)
        found, gained = dict[Request, int](), 0
        gains = self.gains((other.row for other in younger if other.row is not None), beginning)
        for other, gain in zip(younger, gains, strict=False):  # as far as is needed
            if gained >= lacking:
                break
            found[other], gained = gain, gained + gain
        return found if gained >= lacking else {}

    def violations(self, requests: Sequence[Request]) -> list[str]:
        found = list[str]()
        for request in requests:
            if request.row is None:
                continue
            held = len(self._rows[request.row]) * self.block_size
            if request.preemptions >= PREEMPTIONS:
                least = most = self.whole(request)
            elif request.initiated:  # one that waits for its form's work has slots for that position, and one run ahead
                least, most = (self._reservation.upfront(n, 0) for n in (request.computed, request.computed + 2))
            else:
                least = most = self._reservation.upfront(request.known, 0)
            if not least <= held <= most:
                found.append(f"claim {request.claim} has {held} slots and needs {least}")
        found += [
            f"claim {request.claim} was preempted {request.preemptions} times"
            for request in requests
            if request.preemptions > PREEMPTIONS
        ]
        return found
