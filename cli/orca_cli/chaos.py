"""`orca chaos`: rounds of faults under load, on a stack of this machine or on a release in a cluster."""

import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

from orca_chaos.client import Violation
from orca_chaos.faults import Victim
from orca_chaos.local_target import local_target, victims_of
from orca_chaos.record import Record
from orca_chaos.rounds import run
from orca_chaos.target import Target
from orca_common.errors import FailedPrecondition
from orca_local.settings import ServeSettings

# The defaults of a stack under chaos: of each kind enough processes to miss one.
STACK = {"endpoints": 2, "schedulers": 2, "engines": 2, "pp": 2, "max_batch_size": 6, "port": 0, "http_port": 0}
# What a stack under chaos cannot have.
REFUSED = {
    "tls_dir": "the proxies of chaos read what they pass on",
    "redis_url": "chaos kills and freezes Redis, so it starts one of its own",
    "api_keys": "the clients of chaos have no key",
    "api_keys_file": "the clients of chaos have no key",
}


@dataclass(frozen=True)
class Plan:
    """Selects the rounds, and the roles that they may hit (`only`; all when it is empty). record: a file of rounds."""

    seed: int
    rounds: int
    first: int
    streams: int
    only: tuple[str, ...]
    record: Path | None = None

    def chooses(self, victim: Victim) -> bool:
        return not self.only or victim.role in self.only

    def check(self, victims: Sequence[Victim]) -> None:
        """Raises FailedPrecondition when `only` names a role that none of them has."""
        roles = list(dict.fromkeys(victim.role for victim in victims))
        for role in self.only:
            if role not in roles:
                raise FailedPrecondition(f"--only: {role!r} is no role here; the roles are {', '.join(roles)}")


async def on_this_machine(plan: Plan, arguments: Sequence[str], console: Console) -> None:
    """Starts a stack with the arguments of `orca serve`, and harms it."""
    loaded = ServeSettings.load(arguments)
    origins = loaded.origins(arguments)
    settings = loaded.model_copy(update={n: v for n, v in STACK.items() if origins.get(n) == "default"})
    given = settings.model_dump()
    for name, why in REFUSED.items():
        if given[name] is not None:
            raise FailedPrecondition(f"{name}: {why}; run it without")
    plan.check(victims_of(settings))
    folder = Path(settings.run_dir or tempfile.mkdtemp(prefix="orca-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)

    def say(step: str) -> None:
        console.print(step, style="dim", soft_wrap=True)

    with ExitStack() as cleaning:
        if settings.run_dir is None:
            cleaning.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            async with local_target(settings, folder, say) as target:
                await _play(plan, target, console)
        except typer.Exit:
            cleaning.pop_all()
            console.print(f"logs and journals: {folder}", soft_wrap=True)
            raise


async def on_a_cluster(
    plan: Plan, release: str, namespace: str | None, addresses: Sequence[str], redis_url: str | None, console: Console
) -> None:
    """Harms a release that runs."""
    from orca_chaos.cluster_target import cluster_target

    async with cluster_target(release, namespace, addresses, redis_url) as target:
        plan.check(target.victims())
        await _play(plan, target, console)


async def _play(plan: Plan, target: Target, console: Console) -> None:
    def say(sentence: str) -> None:
        console.print(sentence, soft_wrap=True)

    try:
        report = await run(
            target,
            seed=plan.seed,
            rounds=plan.rounds,
            first=plan.first,
            streams=plan.streams,
            chosen=plan.chooses,
            record=Record(plan.record, plan.seed),
            say=say,
        )
    except Violation as violation:
        console.print(f"VIOLATION in {violation}", style="bold red", soft_wrap=True)
        console.print(f"run it again: orca chaos --seed {plan.seed} with the same options", soft_wrap=True)
        raise typer.Exit(1) from None
    console.print(f"\n{report}", soft_wrap=True)
