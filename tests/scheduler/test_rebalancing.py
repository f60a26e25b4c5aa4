"""Two live schedulers share the engines, whoever came first."""

from pathlib import Path

from scheduler.live import world
from scheduler.test_takeover import load, term_of


async def test_a_second_scheduler_gets_its_share(tmp_path: Path) -> None:
    """The first one masters both engines, and hands one over under load: nothing is made twice, nothing is lost."""
    async with world(tmp_path, engines=2, schedulers=1, seconds=0.02) as this:
        before = await this.formed("engine-0", "engine-1")
        (first,) = this.schedulers
        assert before["engine-0"]["owner"] == before["engine-1"]["owner"]
        await load(this, 8, 250, seed=11)
        second = await this.scheduler()
        await this.until(lambda: term_of(second, "engine-1"))
        assert [e["engine"] for e in first.events("engine released to another scheduler")] == ["engine-1"]
        assert min(await this.progress()) < 250, "the load was to outlast the hand-over"
        iterations = await this.completed()
        after = await this.formed("engine-0", "engine-1")
        assert after["engine-0"]["owner"] == before["engine-0"]["owner"] != after["engine-1"]["owner"]
        assert [after[name]["epoch"] for name in after] == [before[name]["epoch"] for name in before]
        assert [await this.losses(f"r{n}") for n in range(8)] == [0] * 8
        for numbers in iterations.values():
            assert numbers == sorted(set(numbers))
        # Nobody gives anything away any more.
        assert len(first.events("engine released to another scheduler")) == 1
        assert not second.events("engine released to another scheduler")
