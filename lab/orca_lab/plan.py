"""How many GPUs does a load need? Tries layouts of a model on a hardware in simulation, the smallest first.

A layout is dropped before it is simulated when its weights or a request do not fit, or when it cannot be fast enough
even where memory is all that binds: each iteration reads all weights once.

Each layout is tried in three ways: iterations as the paper has them, prompts in parts, and prompts on engines of their
own. Where the backlog of the first only grows, the others are not tried: their work is the same, in more iterations or
in smaller batches.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from orca_common.errors import FailedPrecondition
from orca_scheduler.core.roles import Role, Roles
from orca_scheduler.core.sets import PAPER, policy_named

from .calibration import Calibration
from .cost import A100, ALL_REDUCE, Cost, Gpt, Hardware, Load
from .simulator import Delays, Engine, Result, Served, Simulation
from .timeline import percentile
from .workload import Workload

DELAYS = Delays(claim=0.002, commit=0.003, ahead=False, pull=0.001)
MAX_BS = (8, 16, 32, 64, 128)
POSITIONS = (128, 256)  # of an iteration, by which prompts are cut
PARTS = 4  # of the engines: 1, 2 or 3 of them compute prompts
BACKLOG = 0.2  # of all requests in the queue: it only grows
MOST = 8.0  # times the load, up to which headroom is looked for
STEPS = 5  # of the search for it
CHANGE = 0.1  # of all costs


class Slo(NamedTuple):
    """Bounds in seconds at one percentile; 0: any. A gap is between a token and the next one."""

    first_token: float = 0.0
    normalized: float = 0.0
    gap: float = 0.0
    percentile: float = 0.99


class Way(StrEnum):
    """How prompts and increments share the engines."""

    MIXED = "mixed"  # an iteration has both, as in the paper
    CHUNKED = "chunked"  # the same, with prompts in parts
    SPLIT = "split"  # each on engines of its own


class Layout(NamedTuple):
    tp: int
    pp: int
    engines: int
    max_bs: int
    positions: int = 0  # of an iteration, by which prompts are cut; 0: they are whole
    prefill: int = 0  # engines that compute prompts for the others; 0: each does both

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.engines

    @property
    def way(self) -> Way:
        return Way.SPLIT if self.prefill else Way.CHUNKED if self.positions else Way.MIXED

    @property
    def policy(self) -> str:
        return f"stall-free,positions={self.positions}" if self.positions else PAPER.name

    @property
    def roles(self) -> Roles:
        return Roles(self.prefill, self.engines - self.prefill) if self.prefill else Roles()

    def __str__(self) -> str:
        text = f"{self.engines} x (tp {self.tp}, pp {self.pp}), max_bs {self.max_bs}"
        more = f", positions {self.positions}" if self.positions else f", {self.roles}" if self.prefill else ""
        return text + more

    def values(self) -> str:
        """Values of the chart, for `helm install --values`."""
        return (
            f"engine:\n  count: {self.engines}\n  tp: {self.tp}\n  pp: {self.pp}\n"
            f"scheduler:\n  settings:\n    max_batch_size: {self.max_bs}\n    policy: {self.policy}\n"
            + (f"    roles: {self.roles}\n" if self.prefill else "")
        )

    def others(self, positions: Sequence[int]) -> "Iterator[Layout]":
        """The same in the other ways. positions: of iterations, each more than the requests of a batch."""
        yield from (self._replace(positions=one) for one in positions if one > self.max_bs)
        shares = {round(self.engines * part / PARTS) for part in range(1, PARTS)} - {0, self.engines}
        yield from (self._replace(prefill=one) for one in sorted(shares))

    def of(self, cost: Cost, slots: int) -> list[Engine]:
        """The engines of a layout."""
        one, roles = Engine(cost, slots, self.max_bs, policy_named(self.policy)), self.roles
        return [replace(one, role=roles.of(f"engine-{n}") or Role.MIXED) for n in range(self.engines)]


@dataclass(frozen=True)
class Scaled:
    """A cost whose stages take `by` times as long."""

    of: Cost
    by: float

    @property
    def stages(self) -> int:
        return self.of.stages

    @property
    def host(self) -> float:
        return self.of.host

    def stage(self, stage: int, load: Load) -> float:
        return self.by * self.of.stage(stage, load)

    def hop(self, load: Load) -> float:
        return self.of.hop(load)

    @property
    def pull(self) -> float:
        return self.of.pull


class Judged(NamedTuple):
    """A layout that was simulated. `worst`: the largest of its measures over their bounds; at most 1: it holds."""

    layout: Layout
    measures: Slo
    worst: float
    why: str = ""  # it was not simulated to its end
    inside: float = 0.0  # part of the requests for which all bounds hold


class Plan(NamedTuple):
    """`held` are the layouts of the smallest number of GPUs that hold, the one with the most headroom first."""

    held: list[tuple[Judged, float]]  # with its headroom: the load times this holds, too
    failed: list[Judged]
    dropped: list[tuple[Layout, str]]
    last: list[Layout]  # that were tried together: those of the largest number of GPUs

    def best(self, way: Way) -> tuple[Judged, float] | None:
        """The best layout of a way among the largest that were tried, with its headroom; 0: it does not hold."""
        tried = [*self.held, *((one, 0.0) for one in self.failed)]
        return next((one for one in tried if one[0].layout.way is way and one[0].layout in self.last), None)


# What can be tried: an engine's cost and slots; a sentence: why it cannot be.
Costs = Callable[[Layout], tuple[Cost, int] | str]


def on_gpus(model: Gpt, hardware: Hardware) -> Costs:
    """Any tp x pp of a GPT model."""

    def costs(layout: Layout) -> tuple[Cost, int] | str:
        cost = A100(model, layout.tp, layout.pp, hardware)
        if not cost.slots:
            return f"weights take {cost.weight_bytes / 1e9:.1f} GB of a GPU; {hardware.usable / 1e9:.0f} can be used"
        return cost, cost.slots

    return costs


def on_machine(calibrations: Sequence[Calibration]) -> Costs:
    """The layouts that were calibrated. One alone stands for any number of engines like it, each on a machine of its
    own; of several, each is the whole machine, with as many engines as it had.
    Raises FailedPrecondition for two of one layout."""
    of = dict[tuple[int, int, int], Calibration]()
    for one in calibrations:
        tp, pp = one.about["tp"], one.about["pp"]
        if of.setdefault((tp, pp, one.engines), one) is not one:
            raise FailedPrecondition(f"hardware: two calibrations are of {one.engines} x (tp {tp}, pp {pp})")

    def costs(layout: Layout) -> tuple[Cost, int] | str:
        alone = calibrations[0] if len(calibrations) == 1 else None
        found = of.get((layout.tp, layout.pp, alone.engines if alone else layout.engines))
        if found is None:
            return " and ".join(f"tp {tp} and pp {pp}" for tp, pp, _ in of) + " were calibrated"
        if layout.max_bs > found.about["max_bs"]:
            return f"batches of up to {found.about['max_bs']} were calibrated"
        if layout.prefill:
            return "no transfer between engines was calibrated"
        return found.cost, found.slots

    return costs


def calibrated(calibrations: Sequence[Calibration], max_bs: Sequence[int]) -> list[Layout]:
    """The layouts of one machine, as they were calibrated."""
    return [Layout(one.about["tp"], one.about["pp"], one.engines, size) for one in calibrations for size in max_bs]


def layouts(gpus: int, max_bs: Sequence[int], most: int) -> Iterator[Layout]:
    """All layouts of a number of GPUs; tp and pp are powers of two. most: layers of the model."""
    for tp in (tp for tp in ALL_REDUCE if gpus % tp == 0):
        pp = 1
        while tp * pp <= gpus and pp <= most:
            if gpus % (tp * pp) == 0:
                yield from (Layout(tp, pp, gpus // (tp * pp), one) for one in max_bs)
            pp *= 2


def plan(
    costs: Costs,
    workload: Workload,
    slo: Slo,
    limit: int,
    layers: int,
    max_bs: Sequence[int] = MAX_BS,
    say: Callable[[str], None] = lambda sentence: None,
    positions: Sequence[int] = POSITIONS,
    among: Sequence[Layout] = (),
) -> Plan:
    """Tries 1, 2, 4, .. GPUs up to `limit`, until a layout holds. positions: by which prompts are cut. among: layouts
    to try instead, all of them."""
    found, gpus = Plan([], [], [], []), 1

    def try_it(layout: Layout) -> Judged | None:
        """Simulates a layout. None: it was dropped."""
        made = costs(layout)
        why = made if isinstance(made, str) else too_small(layout, *made, workload, slo)
        if why or isinstance(made, str):
            found.dropped.append((layout, why))
            return None
        judged = judge(layout, *made, workload, slo)
        if judged.worst <= 1:
            found.held.append((judged, headroom(layout, *made, workload, slo)))
        else:
            found.failed.append(judged)
        return judged

    def try_all(together: Iterable[Layout]) -> None:
        tried = list[Judged]()
        for layout in together:
            if (mixed := try_it(layout)) is not None:
                others = () if mixed.why else map(try_it, layout.others(positions))
                tried += [mixed, *filter(None, others)]
        if tried:
            found.last[:] = [one.layout for one in tried]

    try_all(among)
    while not among and gpus <= limit and not found.held:
        say(f"{gpus} GPU{'s' if gpus > 1 else ''}")
        try_all(layouts(gpus, max_bs, layers))
        gpus *= 2
    found.held.sort(key=lambda one: (-one[1], one[0].worst))
    found.failed.sort(key=lambda one: one.worst)
    return found


def too_small(layout: Layout, cost: Cost, slots: int, workload: Workload, slo: Slo) -> str:
    """Why a layout needs no simulation; empty: it does."""
    longest = max(one.input_tokens + (one.limit or one.output_tokens) for one in workload)
    if longest > slots:
        return f"a request needs {longest} slots; an engine has {slots}"
    if not isinstance(cost, A100):
        return ""
    if slo.gap and cost.floor > slo.gap:
        return f"reading the weights takes {cost.floor * 1e3:.0f} ms an iteration; a gap may have {slo.gap * 1e3:.0f}"
    seconds = workload[-1].at - workload[0].at
    rate = sum(one.output_tokens for one in workload) / seconds if seconds else 0.0
    most = layout.engines * layout.max_bs * layout.pp / cost.floor
    return f"makes at most {most:.0f} tokens/s of {rate:.0f}" if rate > most else ""


def judge(layout: Layout, cost: Cost, slots: int, workload: Workload, slo: Slo) -> Judged:
    """Simulates a layout. A run whose backlog only grows is stopped."""
    most = max(BACKLOG * len(workload), 2 * layout.engines * layout.max_bs * layout.pp)
    simulation = Simulation(layout.of(cost, slots), DELAYS, tokens=True)
    result = simulation.run(workload, lambda moment, queue: queue > most)
    if result.stopped:
        return Judged(layout, Slo(), float("inf"), "its backlog only grows")
    measures = measured(result, slo.percentile)
    pairs = zip(measures[:3], slo[:3], strict=True)
    worst = max((one / bound for one, bound in pairs if bound), default=0.0)
    return Judged(layout, measures, worst, inside=sum(holds(one, slo) for one in result.warm) / len(result.warm))


def holds(one: Served, slo: Slo) -> bool:
    """Whether all bounds hold for a request; that of gaps for the mean of its gaps, as DistServe counts."""
    gaps = max(1, one.asked.output_tokens - 1)
    pairs = zip((one.first_token, one.normalized, (one.ended - one.first) / gaps), slo[:3], strict=True)
    return all(not bound or measure <= bound for measure, bound in pairs)


def measured(result: Result, at: float) -> Slo:
    """The measures of a run at a percentile."""
    kept = result.warm
    gaps = [after - before for one in kept for before, after in pairwise(one.came or ())]
    return Slo(
        percentile([one.first_token for one in kept], at),
        percentile([one.normalized for one in kept], at),
        percentile(gaps, at) if gaps else 0.0,
        at,
    )


def headroom(layout: Layout, cost: Cost, slots: int, workload: Workload, slo: Slo) -> float:
    """The load times this number holds, too: requests come that many times as fast. At most MOST."""

    def faster(factor: float) -> bool:
        load = [one._replace(at=one.at / factor) for one in workload]
        return judge(layout, cost, slots, load, slo).worst <= 1

    low, high = 1.0, MOST
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if faster(middle) else (low, middle)
    return low


def with_other_costs(costs: Costs, layout: Layout, workload: Workload, slo: Slo) -> list[tuple[float, Judged]]:
    """A layout when all stages take a tenth less, and a tenth more."""
    made = costs(layout)
    assert not isinstance(made, str), "it was simulated"
    cost, slots = made
    return [(by, judge(layout, Scaled(cost, by), slots, workload, slo)) for by in (1 - CHANGE, 1 + CHANGE)]
