"""Shares the engines among the living schedulers: each computes its own part from what it reads in the pool.

Of E engines and S schedulers, each scheduler has E // S engines, and E % S of them may have one more. Who may is not
agreed upon: those that have one more already may keep it, in the order of what they hold and then of their names.

A scheduler with too many engines knows that another has too few, since the parts add up to E. It releases one at a
time, and none while an engine is free.
"""

from collections.abc import Mapping


def may_take(me: str, held: Mapping[str, int], engines: int, living: int) -> bool:
    """Whether this scheduler may take one engine more. `held`: engines by their owner."""
    each, more = divmod(engines, max(1, living))
    mine = held.get(me, 0)
    with_more = sum(count > each for owner, count in held.items() if owner != me)
    return mine < each or (mine == each and with_more < more)


def holds_too_much(me: str, held: Mapping[str, int], engines: int, living: int) -> bool:
    """Whether this scheduler has to release an engine."""
    each, more = divmod(engines, max(1, living))
    mine = held.get(me, 0)
    with_more = sorted((owner for owner, count in held.items() if count > each), key=lambda o: (-held[o], o))
    return mine > each + 1 or (mine == each + 1 and with_more.index(me) >= more)
