"""The request pool under many engines: what Redis spends, and how long requests and tokens take through it.

    python -m orca_bench.pool [--cases 1,1,1 8,2,2 64,8,4 256,32,8 1000,100,10] [--seconds 4] [--only cpu|latency]
    python -m orca_bench.pool --only sustained [--engines 64 100 150]

A case is a number of engines, endpoints and schedulers. The engines compute nothing: every 1/50 s each of them commits
one token for each of its requests, 32 at most. Requests have 128 new tokens, a bit fewer run at once than the engines
could hold, and each one that ends is followed by another. Redis is real, without fsync.

The floor is what the bytes of a commit and their delivery cost as plain commands, without leases, queue and requests
that come and end.

Redis's CPU. `pool_drive` sends the commands of such a release as fast as one process can, which for many engines is
slower than the release: then it is the same work in more time. Measured is Redis's CPU time, and from it follows

    engines that a core sustains = 1 / (CPU seconds that one engine costs in a second of 50 iterations)

That is derived, with a commit for each iteration. Beside it stands what came through while it was measured.

Sustained. `pool_sustained` drives so many engines at their pace, each by the ledger's rule: what its iterations make
while a commit is under way joins the next one. Asked without numbers, it looks for the largest number of which Redis
commits every iteration, and begins nearly every request, within a second, with no backlog that grows and every lease
renewed in time.

Latency. `pool_load` is the services' own code (ledger, delivery, pool and link), in one Python process beside Redis,
with slower engines where there are many. It shows waits that the protocol makes, not the speed of a machine.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from orca_bench.pool_drive import PER_SECOND, Drive, Spent
from orca_bench.pool_load import Case
from orca_bench.pool_sustained import Overrun, Sustained
from orca_local import embedded_pool

CASES = ("1,1,1", "8,2,2", "64,8,4", "256,32,8", "1000,100,10")
DRIVEN = 200  # commits a second that one Python process of `pool_load` surely drives
RENEWALS = 300  # renewals a second, likewise
STEP = 25  # engines, the search for the largest number goes by so many
DOOR, SCHEDULER = 8, 32  # engines for each endpoint, and for each scheduler, while they are sustained
MOST = 12  # commands that are told, those that take longest


@contextmanager
def server() -> Iterator[str]:
    """A server of its own. Gives its URL."""
    with tempfile.TemporaryDirectory(prefix="orca-bench-pool-") as folder:
        child, url = embedded_pool.start(Path(folder), None)
        try:
            yield url
        finally:
            child.terminate()
            child.wait()


def spent(engines: int, endpoints: int, schedulers: int, seconds: float) -> tuple[Spent, float, dict[str, float]]:
    """Redis's CPU, the floor of a commit in microseconds, and the parts of its cost."""
    with server() as url:
        drive = Drive(urlsplit(url).port or 0, engines, endpoints, schedulers)
        found = drive.measure(seconds)
        parts = drive.parts(seconds / 2)
        floor = drive.floor(seconds / 2)
        drive.close()
        return found, floor, parts


def latencies(case: Case, seconds: float) -> dict[str, Any]:
    """What the services' own code saw, in a process of its own."""
    with server() as url:
        command = [sys.executable, "-m", "orca_bench.pool_load", url, json.dumps(case._asdict()), str(seconds)]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def show(engines: int, found: Spent, floor: float, parts: dict[str, float]) -> None:
    """Prints what Redis spends on a case."""
    commit = found.share / PER_SECOND / engines
    print(f"  Redis at full speed: {found.share:.1%} of a core, {commit * 1e6:.0f} us a commit with all around it")
    print(f"  us a commit by part: {', '.join(f'{name} {us:.0f}' for name, us in parts.items())}")
    print(f"  floor: {floor:.0f} us for the bytes of a commit and their delivery as plain commands")
    print(f"  engines that a core sustains: {engines / found.share:.0f}, derived")
    print(
        f"  driven: {found.commits:.0f} commits a second at {found.busy:.0%} of a core, "
        f"as of {found.commits / PER_SECOND:.1f} engines"
    )
    ordered = sorted(found.calls.items(), key=lambda item: -item[1][0] * item[1][1])[:MOST]
    told = ", ".join(f"{name} {us:.1f} x {count:.2f}" for name, (us, count) in ordered)
    print(f"  commands, us x how many a commit (evalsha holds the others): {told}", flush=True)


def carries(engines: int, seconds: float) -> bool:
    """Whether Redis sustains so many engines. Prints how."""
    with server() as url:
        case = Sustained(urlsplit(url).port or 0, engines, -(-engines // DOOR), -(-engines // SCHEDULER))
        try:
            found = case.measure(seconds)
        except Overrun as error:
            print(f"{engines} engines: not sustained, {error}", flush=True)
            return False
        finally:
            case.close()
    told = {
        "iteration to delivery p50": found.delivery[0],
        "p99": found.delivery[1],
        "to its commit at most": found.oldest,
        "submit to claim p99": found.claim,
        "renewals p99": found.renewal[0],
        "at most": found.renewal[1],
    }
    print(
        f"{engines} engines: {'' if found.sustained else 'not '}sustained{', delays grow' if found.grows else ''}, "
        f"{found.joined:.1f} iterations a commit of {found.rows:.0f} rows, "
        f"{', '.join(f'{name} {1e3 * seconds:.0f} ms' for name, seconds in told.items())}; "
        f"Redis {found.redis:.0%} of a core, driver {found.driver:.0%}",
        flush=True,
    )
    return found.sustained


def most(seconds: float) -> int:
    """The largest number of engines, in steps of 25, that Redis sustains."""
    fine, step = 0, 4 * STEP
    while carries(fine + step, seconds):
        fine += step
    while step > STEP:
        step //= 2
        if carries(fine + step, seconds):
            fine += step
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="ENGINES,ENDPOINTS,SCHEDULERS")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--only", choices=("cpu", "latency", "sustained"), help="one of the measurements")
    parser.add_argument(
        "--engines", nargs="+", type=int, help="to sustain, instead of the search for the largest number"
    )
    given = parser.parse_args()
    if given.only in (None, "sustained"):
        if given.engines:
            for engines in given.engines:
                carries(engines, given.seconds)
        else:
            print(f"engines that a core sustains, with joined commits: {most(given.seconds)}", flush=True)
    if given.only == "sustained":
        return
    for text in given.cases:
        engines, endpoints, schedulers = map(int, text.split(","))
        print(f"{engines} engines, {endpoints} endpoints, {schedulers} schedulers", flush=True)
        if given.only != "latency":
            show(engines, *spent(engines, endpoints, schedulers, given.seconds))
        if given.only != "cpu":
            slow_work = max(1.0, engines * PER_SECOND / DRIVEN)
            slow_leases = max(1.0, engines * 2.5 / RENEWALS)
            found = latencies(Case(engines, endpoints, schedulers, slow_work, slow_leases), given.seconds)
            waits = (
                f"submit to claim p99 {found['claim_ms']:.1f} ms, commit to delivery p99 {found['delivery_ms']:.1f} ms"
            )
            empty = f"{found['empty_claims']:.2f} claims without a request for each request"
            print(f"  {waits}, {empty} (work slowed {slow_work:g} times, leases {slow_leases:g} times)", flush=True)


if __name__ == "__main__":
    main()
