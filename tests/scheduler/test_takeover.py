"""A scheduler dies, leaves or freezes under load: another masters its engine, and no stream is harmed."""

import os
import random
import signal
from pathlib import Path

from scheduler.live import VOCAB, Process, World, world


async def load(this: World, requests: int, count: int, seed: int) -> None:
    """Submits requests and waits until every one of them is under way."""
    draw = random.Random(seed)
    for n in range(requests):
        await this.submit(f"r{n}", [draw.randrange(VOCAB) for _ in range(draw.randint(1, 20))], count)

    async def under_way() -> bool:
        return min(await this.progress()) > 5

    await this.until(under_way)


async def newest(this: World, engine: str, requests: int) -> int:
    """The highest iteration of this engine whose tokens are committed."""
    numbers = [0]
    for n in range(requests):
        answer = await this.read(f"r{n}")
        if answer.engines[-1][1] == engine:
            numbers.append(answer.tokens[-1].iteration)
    return max(numbers)


def term_of(process: Process, engine: str) -> int:
    """The last term in which it mastered the engine; 0: never."""
    return max((term for name, term in process.journals() if name == engine), default=0)


async def test_a_killed_schedulers_engine_is_taken_over(tmp_path: Path) -> None:
    async with world(tmp_path, engines=2, schedulers=2, seconds=0.02) as this:
        before = await this.formed("engine-0", "engine-1")
        pids = [this.rank_pid(0), this.rank_pid(1)]
        mastered = [[e for e, _ in scheduler.journals()] for scheduler in this.schedulers]
        assert sorted(mastered) == [["engine-0"], ["engine-1"]]  # each has its share
        (victim, survivor), ((engine,), _) = this.schedulers, mastered
        await load(this, 8, 120, seed=1)
        last = await newest(this, engine, 8)
        assert last > 0
        victim.send(signal.SIGKILL)
        iterations = await this.completed()
        after = await this.formed("engine-0", "engine-1")
        assert after[engine]["owner"] != before[engine]["owner"]
        assert int(after[engine]["term"]) == term_of(survivor, engine) > int(before[engine]["term"])
        for name in before:  # no rank was touched, and no request moved
            assert after[name]["epoch"] == before[name]["epoch"]
        assert [this.rank_pid(0), this.rank_pid(1)] == pids
        assert [await this.losses(f"r{n}") for n in range(8)] == [0] * 8
        for numbers in iterations.values():
            assert numbers == sorted(set(numbers))
        numbers = survivor.iterations()[engine, term_of(survivor, engine)]
        assert numbers == sorted(set(numbers))
        assert numbers[0] > max([last, *victim.iterations()[engine, int(before[engine]["term"])]])


async def test_a_leaving_scheduler_hands_over(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1, schedulers=2, seconds=0.02, run_ahead=1) as this:
        before = (await this.formed("engine-0"))["engine-0"]
        leaver, other = sorted(this.schedulers, key=lambda s: -term_of(s, "engine-0"))
        await load(this, 6, 150, seed=2)
        leaver.send(signal.SIGTERM)
        assert await leaver.ended() == 0
        await this.until(lambda: term_of(other, "engine-0"))
        iterations = await this.completed()
        after = await this.engine("engine-0")
        assert int(after["term"]) == term_of(other, "engine-0") > int(before["term"])
        assert after["epoch"] == before["epoch"]
        assert [await this.losses(f"r{n}") for n in range(6)] == [0] * 6
        # What the leaver ran was committed: nothing was generated a second time.
        made = {number for numbers in iterations.values() for number in numbers}
        ran = leaver.iterations()["engine-0", int(before["term"])] + other.iterations()["engine-0", int(after["term"])]
        assert len(ran) == len(set(ran))
        assert set(ran) == made


async def test_a_frozen_scheduler_is_deposed_and_changes_nothing(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1, schedulers=2, seconds=0.02, run_ahead=1) as this:
        before, pid = (await this.formed("engine-0"))["engine-0"], this.rank_pid(0)
        old, new = sorted(this.schedulers, key=lambda s: -term_of(s, "engine-0"))
        await load(this, 4, 500, seed=3)
        last = await newest(this, "engine-0", 4)
        old.send(signal.SIGSTOP)

        async def goes_on() -> bool:
            return await newest(this, "engine-0", 4) > last + 1000  # only a new master's numbers are so far away

        await this.until(goes_on)
        old.send(signal.SIGCONT)
        await this.until(lambda: old.events("engine left"))
        after = await this.engine("engine-0")
        assert int(after["term"]) == term_of(new, "engine-0") > int(before["term"])
        assert max(await this.progress()) < 500, "the load was to outlast the freeze"
        await this.completed()
        assert await this.engine("engine-0") | {"counter": ""} == after | {"counter": ""}
        assert after["epoch"] == before["epoch"]
        assert not this.supervisors[0].events("rank ended")
        assert this.rank_pid(0) == pid
        assert [await this.losses(f"r{n}") for n in range(4)] == [0] * 4


async def test_an_engine_that_died_with_its_scheduler_gives_its_requests_back(tmp_path: Path) -> None:
    async with world(tmp_path, engines=2, schedulers=2, seconds=0.02) as this:
        victim, engine = this.schedulers[0], next(e for e, _ in this.schedulers[0].journals())
        await load(this, 6, 60, seed=4)
        number = int(engine[-1])
        assert any([(await this.read(f"r{n}")).engines[-1][1] == engine for n in range(6)])
        victim.send(signal.SIGKILL)
        this.supervisors[number].send(signal.SIGKILL)
        os.kill(this.rank_pid(number), signal.SIGKILL)
        await this.completed()  # on the other engine, though nobody ever answers for this one again
