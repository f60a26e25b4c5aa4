"""Classes of requests: who goes first in the queue, and what an API key may ask for.

A request's place is its arrival and what its class adds: `aging` seconds less for each class above `normal`, as much
more below. It is fixed when the request is submitted. So a request that has waited `aging` seconds for each class
between them is not overtaken any more.
"""

import math
from dataclasses import dataclass
from enum import IntEnum

STRICT = 10**14  # microseconds that a class adds where aging has no end: three years, and the most that it adds


class Priority(IntEnum):
    """A class; the numbers are those of orca.v1.Priority. The first one goes first."""

    URGENT = 1
    HIGH = 2
    NORMAL = 3
    LOW = 4


FAIR = 0  # in place of a class, where tenants have fair shares
ABOVE_ALL = len(Priority) + 1  # the number after the lowest class
CLASSES = {one.name.lower(): one for one in Priority}


@dataclass(frozen=True, slots=True)
class Grant:
    """The highest class of a tenant's requests, and the weight of its share."""

    highest: Priority = Priority.NORMAL
    weight: float = 1.0  # of its share, where shares are fair


def lift_of(priority: Priority, aging: float) -> int:
    """Microseconds that a class adds to an arrival. aging: seconds for each class; infinite: the classes are strict."""
    each = STRICT if math.isinf(aging) else min(round(aging * 1e6), STRICT)
    return (priority - Priority.NORMAL) * each
