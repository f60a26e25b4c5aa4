"""Attacks an endpoint from one host, and tells what honest clients of another one notice.

    python tests/hostile/run.py [--only D3] [--seconds 20] [--proxy nginx]

Each attack meets a fresh endpoint process with default settings, on a real Redis and an engine that is played. Prints
one row an attack, and below it what the log says and what the attacker was answered.
"""

import argparse
import asyncio
import sys
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a program of its own it still finds the tests' modules

from endpoint.harness import make_model
from hostile.attacks import ATTACKS
from hostile.proxies import PROXIES, proxy
from hostile.stage import Outcome, attacked, endpoint, engine
from servers import redis_server

NOBODY = "nobody"
HEAD = (
    f"{'attack':16} {'case':4} {'ok':>6} {'failed':>6} {'p50':>6} {'p99':>6} {'max':>6}  {'before':>6} {'peak':>6} "
    f"{'after':>6} {'cpu':>6} {'theirs':>6}  ready"
)


def row(outcome: Outcome) -> str:
    """One line of the table: counts, milliseconds, MB and seconds."""
    failed = outcome.failed.total()
    case = ATTACKS[outcome.attack].case if outcome.attack != NOBODY else ""
    times = " ".join(f"{outcome.quantile(part):6.0f}" for part in (0.5, 0.99, 1.0))
    memory = f"{outcome.before:6.0f} {outcome.peak:6.0f} {outcome.after:6.0f}"
    cpu = f"{outcome.endpoint_cpu:6.1f} {outcome.hostile.get('cpu_s', 0.0):6.1f}"
    counts = f"{outcome.answers.total() - failed:6} {failed:6}"
    return f"{outcome.attack:16} {case:4} {counts} {times}  {memory} {cpu}  {counted(outcome.ready)}"


def details(outcome: Outcome) -> list[str]:
    """What is told below a row."""
    told = {
        "failed": counted(outcome.failed),
        "log": counted(outcome.log.events),
        "no JSON": f"{len(outcome.log.plain)} lines, first: {outcome.log.plain[0][:150]}" if outcome.log.plain else "",
        "attacker": ", ".join(f"{name} {value}" for name, value in outcome.hostile.items() if name != "attack"),
    }
    return [f"    {name}: {value}" for name, value in told.items() if value]


def counted(counts: Counter[str]) -> str:
    """Counts, the largest first."""
    return ", ".join(f"{name} ({count})" for name, count in counts.most_common(8))


async def play(redis_url: str, folder: Path, name: str, seconds: float, kind: str | None) -> Outcome:
    """Runs one attack on a fresh endpoint."""
    pool = f"hostile-{name}-{kind or 'bare'}"
    settings: dict[str, object] = {"redis_url": redis_url, "pool": pool, "model": folder}
    if kind:
        settings["trusted_proxies"] = "127.0.0.1"
    async with AsyncExitStack() as open_:
        await open_.enter_async_context(engine(redis_url, pool))
        started = await open_.enter_async_context(endpoint(settings))
        address = await open_.enter_async_context(proxy(kind, started.addresses["grpc"])) if kind else ""
        return await attacked(started, name, seconds, address=address)


def chosen(only: str | None) -> list[str]:
    """The attacks that a person means by a name, or a case such as D3; all of them by nothing."""
    names = [NOBODY, *ATTACKS]
    if only is None:
        return names
    found = [name for name in names if only == name or (name in ATTACKS and ATTACKS[name].case == only)]
    if not found:
        raise SystemExit(f"--only {only}: neither a case nor one of {', '.join(names)}")
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="an attack, or a case such as D3")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--proxy", choices=PROXIES, help="what stands in front of the door")
    given = parser.parse_args()
    print(HEAD)
    with redis_server() as redis, TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "tiny")
        for name in chosen(given.only):
            outcome = asyncio.run(play(redis.url, model, name, given.seconds, given.proxy))
            print("\n".join([row(outcome), *details(outcome)]), flush=True)


if __name__ == "__main__":
    main()
