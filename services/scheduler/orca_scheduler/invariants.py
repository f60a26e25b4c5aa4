"""The core's invariants (docs/design.md, "The scheduler core").

Property tests check them, and so does a live engine master while nothing is in flight.
"""

from collections import Counter
from itertools import pairwise

from .core import Core


def violations(core: Core) -> list[str]:
    """Sentences about what is wrong in the core's state; none when all is well."""
    found: list[str] = []
    running = [request for _, batch in core.in_flight for request in batch]
    live = core.requests
    if core.n_scheduled > core.n_workers + core.run_ahead:
        found.append(f"{core.n_scheduled} batches are in flight, n_workers is {core.n_workers}")
    found += [f"iteration {i} has {len(b)} requests" for i, b in core.in_flight if not 0 < len(b) <= core.max_bs]
    flights = Counter(request.claim for request in running)
    if max(flights.values(), default=0) > 1 + core.run_ahead or any(len(set(b)) != len(b) for _, b in core.in_flight):
        found.append("a request is in flight twice")
    if flights != {r.claim: r.in_flight for r in live if r.running}:
        found.append("RUNNING requests are not those in flight")
    held = {r.row: r.blocks for r in live if r.row is not None}
    if held != core.slots.rows():
        found.append(f"slots are held by rows {sorted(core.slots.rows())}, live requests have {sorted(held)}")
    blocks = [block for row in held.values() for block in row]
    if len(set(blocks)) != len(blocks) or any(not 0 <= b < core.slots.n_blocks for b in blocks):
        found.append("a block is held twice, or does not exist")
    reserved = sum(core.slots.size(r.arrived.max_tokens) for r in live if r.row is not None)
    if reserved != core.slots.reserved or reserved > core.slots.n_slots:
        found.append(f"{core.slots.reserved} slots are reserved, live requests need {reserved}")
    found += [
        f"claim {later.claim} ran {later.iterations} iterations, claim {earlier.claim} before it {earlier.iterations}"
        for earlier, later in pairwise([r for r in live if r.in_order and (r.goes_on or not r.running)])
        if later.iterations > earlier.iterations
    ]
    found += [f"claim {r.claim} ended and was kept" for r in live if r.ended and not r.running]
    found += [
        f"claim {r.claim} ran {r.iterations} iterations and has row {r.row}"
        for r in live
        if (r.row is None) != (r.iterations == 0)
    ]
    return found
