"""The core's invariants whatever its policy, and those of the policy (docs/design.md, "The scheduler core").

Property tests check them, and so does a live engine master while nothing is in flight.
"""

from collections import Counter

from .core import Core


def violations(core: Core) -> list[str]:
    """Sentences about what is wrong in the core's state; none when all is well."""
    found: list[str] = []
    running = [request for flight in core.in_flight for request in flight.requests]
    live, kept, memory = core.requests, core.kept, core.memory
    if core.n_scheduled > core.n_workers + core.run_ahead:
        found.append(f"{core.n_scheduled} batches are in flight, n_workers is {core.n_workers}")
    sizes = [(flight.iteration, len(flight.requests)) for flight in core.in_flight]
    found += [f"iteration {i} has {size} requests" for i, size in sizes if not 0 < size <= core.limits.max_bs]
    flights = Counter(request.claim for request in running)
    twice = any(len(set(flight.requests)) < len(flight.requests) for flight in core.in_flight)
    if max(flights.values(), default=0) > 1 + core.run_ahead or twice:
        found.append("a request is in flight twice")
    if flights != {r.claim: r.in_flight for r in live if r.running and not r.elsewhere}:
        found.append("RUNNING requests are not those in flight")
    rows, held = memory.rows(), {r.row for r in (*live, *kept) if r.row is not None}
    if held != rows.keys():
        found.append(f"slots are held by rows {sorted(rows)}, live requests have {sorted(held)}")
    blocks = {block for row in rows.values() for block in row}
    if any(len(set(row)) < len(row) for row in rows.values()) or not blocks <= set(
        range(memory.n_slots // memory.block_size)
    ):
        found.append("a row has a block twice, or one that does not exist")
    if memory.reserved != len(blocks) * memory.block_size:
        found.append(f"{memory.reserved} slots are reserved, rows hold {len(blocks) * memory.block_size}")
    for r in live:
        held = len(rows.get(r.row, ())) if r.row is not None else len(r.keys[1:])  # it may begin behind kept blocks
        held_by = held * memory.block_size
        if r.computed > held_by:
            found.append(f"claim {r.claim} has {r.computed} positions in {held_by} slots")
        if r.holds > (held_by if r.row is not None else 0):
            found.append(f"claim {r.claim} counts on {r.holds} slots in its row, which has {held_by}")
        if not r.ended and not 0 <= r.computed < r.known:
            found.append(f"claim {r.claim} has computed {r.computed} of {r.known} positions")
    found += [f"claim {r.claim} ended and was kept" for r in live if r.ended and not r.running]
    return found + core.policy.violations((*live, *kept), memory)
