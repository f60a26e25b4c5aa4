"""Classes of requests under more load than is sustained: the paper's 175B at 11 requests/s, a fifth of them high."""

import random
import statistics
from dataclasses import dataclass

from orca_common.priorities import Priority
from orca_lab.cost import A100
from orca_lab.experiments import TABLE_1
from orca_lab.simulator import Delays, Engine, Simulation
from orca_lab.workload import PAPER, POISSON, Asked, Seeds, drawn

SEEN = Delays()
LIVE = Delays(claim=0.002, commit=0.003, ahead=False)
COST = A100(*TABLE_1["175b"])
MAX_BS, REQUESTS = 32, 2400


@dataclass
class Day:
    high: float  # ms a token of the high ones, median
    longest: float  # seconds, of the others


def served(workload: list[Asked], aging: float = 60.0, delays: Delays = SEEN) -> Day:
    result = Simulation([Engine(COST, COST.slots, MAX_BS)], delays, aging=aging).run(workload)
    high = [one.normalized * 1e3 for one in result.requests if one.asked.priority == Priority.HIGH]
    others = [one.latency for one in result.requests if one.asked.priority != Priority.HIGH]
    return Day(statistics.median(high), max(others, default=0.0))


def test_a_fifth_is_high() -> None:
    """Their median is at most twice what it is alone, and 0.4 of that of first come, first served. No other request
    takes 15 % longer than the slowest one did; with a short `aging` the protection fades."""
    chance = random.Random(1)
    plain = drawn(PAPER, POISSON, 11.0, REQUESTS, Seeds.of(1))
    classes = [chance.choice([Priority.HIGH] + 4 * [Priority.NORMAL]) for _ in plain]
    workload = [one._replace(priority=priority) for one, priority in zip(plain, classes, strict=True)]
    alone = served([one for one in workload if one.priority == Priority.HIGH])
    first_come = served(workload, aging=0.0)
    for delays in (SEEN, LIVE):
        day = served(workload, delays=delays)
        print(
            f"{day.high:.0f} ms, alone {alone.high:.0f}, first come {first_come.high:.0f}; longest {day.longest:.0f} s"
        )
        assert day.high <= 2 * alone.high
        assert day.high <= 0.4 * first_come.high
        assert day.longest <= 1.15 * first_come.longest
    assert served(workload, aging=10.0).high > 1.5 * day.high
