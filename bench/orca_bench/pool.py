"""The request pool under many engines: what Redis spends, and how long requests and tokens take through it.

    python -m orca_bench.pool [--cases 1,1,1 8,2,2 64,8,4 256,32,8 1000,100,10] [--seconds 6]

A case is a number of engines, endpoints and schedulers. The engines compute nothing: every 1/50 s each of them commits
one token for each of its 32 requests. All that talks to the pool is the services' own code (ledger, delivery, pool and
link) over a real Redis without fsync; the rest of the services is left out. Requests have 128 new tokens, a bit fewer
run at once than the engines could hold, and each one that ends is followed by another.

One machine cannot drive so many engines at full speed. The engines then iterate more slowly, and the leases of the
largest cases are longer. Both are printed ("slowed"), and Redis's CPU time is counted apart for what depends on the
clock (renewals, sweeps, reads that wait) and for what depends on the work, so the share at full speed is known:

    share = share at rest x slowness of the leases + CPU seconds of an iteration x iterations a second at full speed

The latencies are those of the slowed load, in one Python process beside Redis: they show waits that the protocol makes,
not the speed of a machine.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orca_bench.pool_load import PER_SECOND, Case, Shares
from orca_local import embedded_pool

CASES = ("1,1,1", "8,2,2", "64,8,4", "256,32,8", "1000,100,10")
DRIVEN = 200  # commits a second that one Python process surely drives
RENEWALS = 300  # renewals a second, likewise


def measured(case: Case, seconds: float) -> dict[str, Any]:
    """Runs a case in a process of its own against a server of its own, and returns what it printed."""
    with tempfile.TemporaryDirectory(prefix="orca-bench-pool-") as folder:
        child, url = embedded_pool.start(Path(folder), None)
        try:
            command = [sys.executable, "-m", "orca_bench.pool_load", url, json.dumps(case._asdict()), str(seconds)]
            return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        finally:
            child.terminate()
            child.wait()


def show(case: Case, found: dict[str, Any]) -> Shares:
    """Prints a case, and returns its shares of a core at full speed."""
    shares = Shares(**found["shares"])
    print(
        f"{case.engines} engines, {case.endpoints} endpoints, {case.schedulers} schedulers "
        f"(work slowed {case.slow_work:g} times, leases {case.slow_leases:g} times)"
    )
    print(
        f"  Redis at full speed: {shares.total:.1%} of a core: at rest {shares.rest:.2%}, "
        f"{shares.iteration * 1e6:.0f} us an iteration of an engine"
    )
    print(f"  commits a second: {found['commits']:.0f} driven, {case.engines * PER_SECOND} at full speed")
    print(f"  submit to claim p99 {found['claim_ms']:.1f} ms, commit to delivery p99 {found['delivery_ms']:.1f} ms")
    print("  us a call (calls):", ", ".join(f"{n} {us:.0f} ({calls})" for n, (us, calls) in found["calls"].items()))
    print(f"  claims that took nothing, for each request: {found['empty_claims']:.2f}", flush=True)
    return shares


def carried(cases: Sequence[tuple[Case, Shares]]) -> float:
    """How many engines fill one core: by the straight line between the two cases around a share of 1."""
    points = sorted((shares.total, case.engines) for case, shares in cases)
    below = max((p for p in points if p[0] <= 1), default=(0.0, 0))
    above = min((p for p in points if p[0] > 1), default=None)
    if above is None:
        return below[1] / below[0]
    return below[1] + (1 - below[0]) / (above[0] - below[0]) * (above[1] - below[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="ENGINES,ENDPOINTS,SCHEDULERS")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each of the two windows of a case")
    given = parser.parse_args()
    results: list[tuple[Case, Shares]] = []
    for text in given.cases:
        engines, endpoints, schedulers = map(int, text.split(","))
        slow_work = max(1.0, engines * PER_SECOND / DRIVEN)
        slow_leases = max(1.0, engines * 2.5 / RENEWALS)
        case = Case(engines, endpoints, schedulers, slow_work, slow_leases)
        results.append((case, show(case, measured(case, given.seconds))))
    print(f"engines that one core of Redis carries: {carried(results):.0f}")


if __name__ == "__main__":
    main()
