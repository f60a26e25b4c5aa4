"""Every statement of the paper's section 6, with what we found: the table of `orca lab claims`."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple

from . import paper
from .baseline.simulated import Batched
from .cost import A100, TABLE_1, Constant
from .experiments import Found, Number, Point
from .real_claims import said
from .report import shown
from .simulator import Engine, Ran, Simulation, simulate
from .workload import PAPER, POISSON, Asked, Seeds, drawn


class Verdict(StrEnum):
    REPRODUCED = "reproduced"
    LEVEL = "level"
    NOT_REPRODUCED = "not reproduced"
    INPUT = "input, not a result"
    PICTURE = "only in the picture"
    GPUS = "needs more than one GPU"


class Claim(NamedTuple):
    """A row: where the paper says what, and what came out. `real`: measured on a machine."""

    where: str
    statement: str
    paper: str
    simulated: str
    verdict: Verdict
    real: str = "not run"


class Results:
    """The numbers and points of all figures."""

    def __init__(self, found: Mapping[int, Found]) -> None:
        self._found = found

    def number(self, figure: int, name: str) -> Number:
        return self._found[figure].numbers[name]

    def sustained(self, panel: str, system: str, figure: int = 10) -> float:
        """The rates that a system sustains; ft on more than one stage with phi 1."""
        names = (f"{panel} {system}{phi} sustained, req/s" for phi in ("", " phi 1"))
        numbers = self._found[figure].numbers
        return next(numbers[name].mean for name in names if name in numbers)

    def named(self, begin: str, end: str) -> dict[str, Number]:
        numbers = self._found[10].numbers
        return {name: one for name, one in numbers.items() if name.startswith(begin) and name.endswith(end)}

    def curve(self, figure: int, panel: str, system: str) -> list[tuple[float, float]]:
        """Rates and mean latencies of a system with phi 1, by rate."""
        by_rate = dict[float, list[Point]]()
        for point in self._found[figure].points:
            if (point.panel, point.system, point.phi) == (panel, system, 1.0):
                by_rate.setdefault(point.x, []).append(point)
        return sorted((rate, statistics.mean(p.latency_ms for p in own)) for rate, own in by_rate.items())

    def panels(self, figure: int) -> list[str]:
        return list(dict.fromkeys(point.panel for point in self._found[figure].points))

    def systems(self, figure: int, panel: str, kind: str) -> list[str]:
        points = self._found[figure].points
        return list(dict.fromkeys(p.system for p in points if p.panel == panel and p.system.startswith(kind)))

    def below(self, figure: int, panel: str, better: str, worse: str) -> bool:
        """Whether `better` is faster at each rate of `worse`, or less than 10 % slower: at the lowest loads, where no
        batch has a second request, both are the same engine. It is looked at where its own rate is at least as high."""
        ours = self.curve(figure, panel, better)
        for rate, latency in self.curve(figure, panel, worse):
            above = [ms for at, ms in ours if at >= rate]
            if not above or above[0] > 1.1 * latency:
                return False
        return True


def claims(results: Results, real: Mapping[int, Found] = {}) -> list[Claim]:
    """Returns all rows, each with the simulation's verdict. real: live figures, as far as they were made."""
    rows = [*engine_claims(results), *scheduling_claims(results), *homogeneous_claims(results), *prose_claims(results)]
    return [row._replace(real=said(row.where, row.statement, real)) if row.real == "not run" else row for row in rows]


def reproduced(holds: bool) -> Verdict:
    return Verdict.REPRODUCED if holds else Verdict.NOT_REPRODUCED


def engine_claims(results: Results) -> list[Claim]:
    smallest = all(
        A100(model, tp, pp).slots and not (tp * pp > 1 and A100(model, *half(tp, pp)).slots)
        for model, tp, pp in TABLE_1.values()
    )
    memory = all(
        not A100.of_the_paper(name).allocates(batch) and A100.of_the_paper(name).allocates(batch // 2)
        for name, batch in paper.OUT_OF_MEMORY.items()
    )
    nine_c = results.number(9, "175b orca(128) batch 32, ms/token")
    return [
        Claim("Table 1", "the models need 1, 8, 16 and 32 GPUs", "1, 8, 16, 32",
              "the smallest powers of two whose GPUs hold the weights", reproduced(smallest)),
        Claim("9a", "on 13B, Orca's engine is similar or slightly worse: attention is not batched", "",
              "the model has one time of attention for both", Verdict.INPUT),
        Claim("9b", "on 101B, both engines are alike", "", "phi is 1 on one stage", Verdict.INPUT),
        Claim("9c", "on 175B without pipelining, Orca is up to 47 % faster", "47 %",
              "phi up to 1.47 says so", Verdict.INPUT, real="needs more than one GPU"),
        Claim("9", "FasterTransformer has no memory for batch 8 on 13B, 16 on 101B", "8, 16",
              "8, 16, with 36 GB usable", reproduced(memory)),
        Claim("9c", "orca(128) takes 95 ms per token (half of 190)", "95 ms",
              f"{shown(nine_c)} ms at batch 32", reproduced(abs(nine_c.mean / 95 - 1) < 0.1)),
        Claim("9", "the other execution times", "", "docs/lab.md has ours", Verdict.PICTURE),
        Claim("9c", "341B is similar to 175B", "omitted", "phi is the same input", Verdict.INPUT,
              real="needs more than one GPU"),
    ]  # fmt: skip


def half(tp: int, pp: int) -> tuple[int, int]:
    return (tp, pp // 2) if pp > 1 else (tp // 2, 1)


def scheduling_claims(results: Results) -> list[Claim]:
    rows = list[Claim]()
    (_, ft_low), (_, orca_low) = results.curve(10, "101b", "ft(1,1)")[0], results.curve(10, "101b", "orca(8)")[0]
    rows.append(
        Claim("10a", "on 101B at low load both are alike", "",
              f"ft(1,1) {ft_low:.0f}, orca(8) {orca_low:.0f} ms per token at the lowest rates",
              Verdict.LEVEL if abs(ft_low / orca_low - 1) < 0.2 else Verdict.NOT_REPRODUCED)
    )  # fmt: skip
    peak = results.sustained("101b", "ft(8,8)")
    rows.append(
        Claim("10a", "FasterTransformer peaks at 0.49 req/s", "0.49", f"{peak:.2f}, ft(8,8) on 101B",
              reproduced(abs(peak / paper.FT_PEAK_101B - 1) < 0.1))
    )  # fmt: skip
    better = {
        panel: all(results.below(10, panel, "orca(8)", system) for system in results.systems(10, panel, "ft"))
        for panel in ("175b", "341b")
    }
    rows.append(
        Claim("10b, c", "on 175B and 341B Orca is better at every load", "",
              "orca(8) against each ft at phi 1, within 10 % at the lowest loads: "
              + ", ".join(f"{panel} {'yes' if holds else 'no'}" for panel, holds in better.items()),
              reproduced(all(better.values())))
    )  # fmt: skip
    rows += ratio_claims(results)
    for panel in ("101b", "175b", "341b"):
        systems = results.systems(10, panel, "orca")
        rates = [results.sustained(panel, system) for system in systems]
        best = systems[rates.index(max(rates))]
        shown_rates = ", ".join(f"{system} {rate:.3g}" for system, rate in zip(systems, rates, strict=True))
        rows.append(
            Claim("10", f"a larger max_bs raises throughput without hurting latency ({panel})", "", f"{shown_rates} "
                  f"req/s sustained; it ends at {best}", reproduced(best == systems[-1]))
        )  # fmt: skip
    return [*rows, *setting_claims(results)]


def ratio_claims(results: Results) -> list[Claim]:
    """The paper's headline, with its band."""
    ours = {name.split()[1]: one for name, one in results.named("175b orca", "at 190 ms/token, req/s").items()}
    theirs = results.named("175b ft", "at 190 ms/token, req/s")
    by_phi = dict[str, Number]()
    for name, one in theirs.items():
        phi = name.split("phi ")[1].split()[0]
        if phi not in by_phi or one.mean > by_phi[phi].mean:
            by_phi[phi] = one
    low, high = min(one.mean for one in by_phi.values()), max(one.mean for one in by_phi.values())
    rows = [
        Claim("10b", "FasterTransformer carries 0.185 req/s at 190 ms per token", "0.185",
              ", ".join(f"phi {phi}: {shown(one)}" for phi, one in by_phi.items()),
              reproduced(low <= paper.FT_175B <= high))
    ]  # fmt: skip
    between = [one for one in ours.values() if one.low * 0.98 <= paper.ORCA_175B <= one.high * 1.02]
    rows.append(
        Claim("10b", "Orca carries 6.81 req/s at 190 ms per token", "6.81",
              ", ".join(f"{label}: {shown(one)}" for label, one in ours.items()) + "; above what is sustained",
              reproduced(bool(between)))
    )  # fmt: skip
    ratios = {label: (one.mean / high, one.mean / low) for label, one in ours.items() if low}
    rows.append(
        Claim("10b", "that is 36.9 times as much", "36.9",
              ", ".join(f"{label}: {a:.0f} to {b:.0f}" for label, (a, b) in ratios.items()) + ", over phi",
              reproduced(any(a <= paper.RATIO <= b for a, b in ratios.values())))
    )  # fmt: skip
    return rows


def setting_claims(results: Results) -> list[Claim]:
    """Which settings are FasterTransformer's best."""
    best, whole = list[str](), dict[str, float]()
    for panel in ("101b", "175b", "341b"):
        rates = {system: results.sustained(panel, system) for system in results.systems(10, panel, "ft")}
        best.append(max(rates, key=lambda system: rates[system]))
        for system, rate in rates.items():
            max_bs, mbs = system[3:-1].split(",")
            if mbs != max_bs:
                whole[f"{panel} {system}"] = rate / rates[f"ft({max_bs},{max_bs})"]
    smaller = max(whole.values())
    alike = Verdict.LEVEL if smaller < 1.05 else Verdict.NOT_REPRODUCED
    named = {f"ft({max_bs},{mbs})" for max_bs, mbs in paper.BEST_FT}
    eight = results.sustained("175b", "ft(16,16)") / results.sustained("175b", "ft(8,8)")
    return [
        Claim("10", "FasterTransformer's best settings are (1,1) and (8,8)", "", f"sustained: {', '.join(best)}",
              reproduced(set(best) <= named)),
        Claim("10", "mbs = max_bs is best", "", ", ".join(f"{k} {v:.2f}" for k, v in whole.items())
              + " of the rate with mbs = max_bs", Verdict.REPRODUCED if smaller < 1 else alike),
        Claim("10", "a larger max_bs may hurt FasterTransformer", "", f"ft(16,16) has {eight:.2f} of ft(8,8) on 175B; "
              "at 190 ms ft(8,8) carries less than ft(1,1)",
              reproduced(results.number(10, "175b ft(8,8) phi 1 at 190 ms/token, req/s").mean
                         < results.number(10, "175b ft(1,1) phi 1 at 190 ms/token, req/s").mean)),
    ]  # fmt: skip


def homogeneous_claims(results: Results) -> list[Claim]:
    gains, pipeline, below, above = list[float](), list[float](), list[bool](), list[bool]()
    for panel in results.panels(11):
        one, eight = (results.sustained(panel, system, 11) for system in ("ft(1,1)", "ft(8,8)"))
        alone = results.sustained(panel, "orca(1)", 11)
        gains.append(eight / one)
        pipeline.append(alone / one)
        below.append(alone < eight)
        above.append(results.below(11, panel, "orca(8)", "ft(8,8)"))
    return [
        Claim("11", "FasterTransformer gains from max_bs", "", f"ft(8,8) sustains {min(gains):.1f} to {max(gains):.1f} "
              "times ft(1,1)", reproduced(min(gains) > 1)),
Claim("11", "Orca is better than ft(8,8) but for max_bs 1", "",
              f"orca(8) at every load of {sum(above)} of {len(above)} traces, within 10 % at the lowest; "
              f"orca(1) sustains less than ft(8,8) at {sum(below)}", reproduced(all(above) and all(below))),
        Claim("11", "orca(1) is a plain pipeline", "", f"{min(pipeline):.2f} to {max(pipeline):.2f} times ft(1,1) on "
              "two stages", reproduced(all(1.8 < ratio < 2.2 for ratio in pipeline))),
        Claim("11", "the traces' lengths and all numbers", "", "lengths are ours", Verdict.PICTURE),
    ]  # fmt: skip


def prose_claims(results: Results) -> list[Claim]:
    """Statements that small simulations show."""
    waits, late = latest_start()
    stage = Constant(1.0, stages=3)
    orca = simulate(Engine(stage, 1 << 12, 2), [Asked(0.0, 4, 100)] * 6)
    ft = Batched(stage, 2).run([(4, 100)] * 4)
    idle, bubbles = 1 - orca.busy[0][0] / orca.seconds, 1 - ft[1][0] / ft[0]
    where = "175b batchmaker at 1 of orca(1)'s sustained rate, mean batch"
    cells = results.number(10, where)
    return [
        Claim("4.1", "a new request waits for one iteration at most", "", f"{waits} of {waits} with room began at the "
              f"next one; {late} later", reproduced(not late)),
        Claim("4.1", "a request that has ended returns at once", "", "in the commit of its last iteration, by the core",
              Verdict.REPRODUCED),
        Claim("4.2", "no bubbles: n_workers batches keep all stages busy", "", f"equal stages {idle:.0%} idle; "
              f"request-level with two microbatches {bubbles:.0%}", reproduced(idle < 0.02 < bubbles)),
        Claim("7", "a Transformer has distinct cells for token indexes 33 to 640, so BatchMaker hardly batches",
              f"{paper.CELLS[0]} to {paper.CELLS[1]}", f"mean batch {shown(cells)} at what orca(1) sustains",
              reproduced(cells.high < 1.1)),
    ]  # fmt: skip


def latest_start() -> tuple[int, int]:
    """Requests that arrived while there was room for them, and those of them that did not begin at the next
    iteration."""
    ran = list[Ran]()
    cost = replace(A100.of_the_paper("101b"), host=0.0)
    workload = drawn(PAPER, POISSON, 1.0, 200, Seeds.of(1))
    result = Simulation([Engine(cost, cost.slots, 64)], watch=ran.append).run(workload)
    begins = [one.stages[0][0] for one in ran]
    late = 0
    for one in result.requests:
        following = next(at for at in begins if at >= one.asked.at)
        late += one.began > following
    return len(workload), late


COLUMNS: Mapping[str, Callable[[Claim], str]] = {
    "section or figure": lambda claim: claim.where,
    "statement": lambda claim: claim.statement,
    "paper": lambda claim: claim.paper,
    "ours, simulated": lambda claim: claim.simulated,
    "ours, real": lambda claim: claim.real,
    "verdict": lambda claim: claim.verdict.value,
}


def markdown(rows: list[Claim]) -> str:
    """The table, as a page."""
    lines = [list(COLUMNS), ["---"] * len(COLUMNS), *([of(row) for of in COLUMNS.values()] for row in rows)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    about = (
        "The verdicts are on the simulation. The real column is of another model and machine: its figure says which."
    )
    return f"# The statements of the paper's section 6\n\n{about}\n\n{table}\n"
