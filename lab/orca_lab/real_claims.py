"""Live figures beside the statements of the paper's section 6: the column "ours, real" of `orca lab claims`.

A live figure is of another model on another machine, so it answers statements about ratios and orders alone.
"""

from collections.abc import Callable, Mapping

from .experiments import Found, Number

SUSTAINED = " sustained, req/s"


def said(where: str, statement: str, real: Mapping[int, Found]) -> str:
    """Returns the measurement for a statement; "not run" where its figure was not made, or lacks the systems."""
    for (place, begins), (figure, find) in FINDERS.items():
        if where == place and statement.startswith(begins) and figure in real:
            return find(real[figure]) or "not run"
    return "not run"


def measured(found: Found) -> dict[str, Number]:
    """The numbers that are not simulated, by their names without the panel's, which is the same in all."""
    panels = {point.panel for point in found.points if not point.panel.endswith(", simulated")}
    return {
        name.removeprefix(f"{panel} "): number
        for panel in panels
        for name, number in found.numbers.items()
        if name.startswith(f"{panel} ")
    }


def rates(found: Found, kind: str) -> dict[str, float]:
    """Returns the rate that each system of a kind sustains, in requests per second."""
    return {
        name.removesuffix(SUSTAINED): number.mean
        for name, number in measured(found).items()
        if name.startswith(kind) and name.endswith(SUSTAINED)
    }


def listed(of: Mapping[str, float]) -> str:
    return ", ".join(f"{system} {rate:.3g}" for system, rate in of.items()) + " req/s sustained" if of else ""


def engines(found: Found) -> str:
    numbers = measured(found)
    ratios = [
        number.mean / numbers[f"ft{name.removeprefix('orca')}"].mean
        for name, number in numbers.items()
        if name.startswith("orca") and f"ft{name.removeprefix('orca')}" in numbers
    ]
    return f"Orca's engine takes {min(ratios):.2f} to {max(ratios):.2f} of the baseline's time" if ratios else ""


def ratio(found: Found) -> str:
    model = next((n.mean for name, n in found.numbers.items() if name.endswith("simulated orca over ft")), None)
    over = measured(found).get("orca over ft")
    if over is None or model is None:
        return ""
    return f"{over.mean:.3g} times at twice the unloaded latency; {model:.3g} simulated with the same calibrations"


def batches(found: Found) -> str:
    return listed(rates(found, "orca"))


def settings(found: Found) -> str:
    return listed(rates(found, "ft"))


def times(found: Found, over: str, under: str) -> str:
    own = rates(found, "")
    return f"{over} sustains {own[over] / own[under]:.2f} times {under}" if own.keys() >= {over, under} else ""


FINDERS: Mapping[tuple[str, str], tuple[int, Callable[[Found], str]]] = {
    ("9a", "on 13B"): (9, engines),
    ("10b", "that is 36.9"): (10, ratio),
    ("10", "a larger max_bs raises"): (10, batches),
    ("10", "FasterTransformer's best settings"): (10, settings),
    ("11", "FasterTransformer gains"): (11, lambda found: times(found, "ft(8,8)", "ft(1,1)")),
    ("11", "Orca is better than ft(8,8)"): (11, lambda found: times(found, "orca(8)", "ft(8,8)")),
    ("11", "orca(1) is a plain pipeline"): (11, lambda found: times(found, "orca(1)", "ft(1,1)")),
}
