"""Runs the simulator over many seeds. A seed that fails is told with the end of its trace, and fails again alone.

python tests/simulator/simulate.py --seeds 200
python tests/simulator/simulate.py --seeds 1 --first 17 --trace
"""

import argparse
import sys
import time
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from simulator.faults import KINDS, PULLS  # noqa: E402
from simulator.processes import Violation  # noqa: E402
from simulator.simulation import Simulation  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs the simulator of the pool's protocol.")
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--trace", action="store_true", help="print the whole trace of every seed")
    parser.add_argument(
        "--fault", action="append", choices=KINDS + PULLS, help="only faults of this kind; may be repeated"
    )
    parser.add_argument("--roles", action="store_true", help="engines have roles; without it in a quarter of the seeds")
    parser.add_argument("--stop", action="store_true", help="end with the first seed that fails")
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    steps, began, failed = 0, time.process_time(), []
    for seed in range(options.first, options.first + options.seeds):
        lines, kinds = 1 << 20 if options.trace else 60, options.fault and tuple(options.fault)
        simulation = Simulation(seed, lines, kinds, options.roles or None)
        violation = None
        try:
            simulation.run()
        except Violation as found:
            violation = found
            failed.append(seed)
        if violation is not None or options.trace:
            print("\n".join(simulation.world.trace))
        if violation is not None:
            print(f"seed {seed}: {violation}")
            if violation.__cause__ is not None:
                traceback.print_exception(violation.__cause__)
        steps += simulation.world.steps
        if failed and options.stop:
            break
    minutes = (time.process_time() - began) / 60
    print(
        f"{options.seeds} seeds, {steps} steps, {steps / minutes:,.0f} a minute of CPU, {len(failed)} failed {failed}"
    )
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
