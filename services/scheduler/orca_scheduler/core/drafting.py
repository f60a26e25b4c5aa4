"""Which drafts an iteration verifies. A draft costs a position, and saves an iteration where it is right.

The number of a request's drafts follows what was right of the last ones: twice as many where all were, half as many
where none was, and none for some tokens after that.
"""

from .memory import Memory
from .request import Request
from .selection import Limits, Plan

MOST = 8  # of a request
PAUSE = 16  # tokens without drafts, after the last draft was wrong
POSITIONS = 32  # of an iteration that has drafts: beyond it a machine computes as long as it reads weights, or longer


def adapt(request: Request, right: int, drafted: int) -> None:
    """Sets how many drafts a request gets next, by how many of its last ones were right."""
    if right == drafted:
        request.depth = min(2 * request.depth, MOST)
    elif not right:
        request.depth //= 2
        if not request.depth:
            request.depth, request.undrafted = 1, request.generated + PAUSE


def with_drafts(plan: Plan, limits: Limits, memory: Memory) -> Plan:
    """The same batch, with drafts as far as there are positions, in the batch's order, and none where a row would need
    slots for them."""
    if len(plan.batch) >= POSITIONS:
        return plan
    left = min(limits.positions or POSITIONS, POSITIONS) - sum(count for _, count in plan.batch)
    drafts = dict[int, int]()
    for request, count in plan.batch:
        if left <= 0:
            break
        arrived = request.arrived
        in_pause = request.generated < request.undrafted
        if not request.offered or request.row is None or in_pause or count != request.remaining:
            continue
        most = min(request.offered, request.depth, left, arrived.max_tokens - request.known - 1)
        while most > 0 and memory.need(request, count + most) > memory.need(request, count):
            most -= 1
        if most > 0:
            drafts[request.claim] = most
            left -= most
    return Plan(plan.batch, plan.stop, plan.preempt, drafts) if drafts else plan
