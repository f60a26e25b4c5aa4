"""A scheduler's gauges, read at each scrape: its engines as they are, and the queue (`orca_common.metrics`)."""

from collections.abc import Callable, Iterable

from orca_common.metrics import Metrics, Reading

from .master.master import EngineMaster


def report(
    metrics: Metrics, masters: Callable[[], Iterable[EngineMaster]], queue: Callable[[], tuple[int, float] | None]
) -> None:
    """Has the gauges read from the engines that are mastered, and from the queue: its length, the first one's age.

    Both are called in the status port's thread. A queue of None is not known now, and has no value.
    """

    def of_each(value: Callable[[EngineMaster], float]) -> Callable[[], Reading]:
        return lambda: [((master.engine,), value(master)) for master in masters()]

    def of_queue(part: int) -> Callable[[], Reading]:
        def read() -> Reading:
            known = queue()
            return () if known is None else [((), known[part])]

        return read

    def slots() -> Reading:
        for master in masters():
            reserved, all_of_them = master.slots
            yield (master.engine, "reserved"), reserved
            yield (master.engine, "free"), all_of_them - reserved

    def caches() -> Reading:
        for master in masters():
            size = master.core.block_size
            if blocks := master.slots[1] // size:
                yield (master.engine, str(size), str(blocks)), 1

    def usage(master: EngineMaster) -> float:
        reserved, all_of_them = master.slots
        return reserved / all_of_them if all_of_them else 0.0

    metrics.read("orca_num_requests_waiting", of_queue(0))
    metrics.read("orca_queue_oldest_age_seconds", of_queue(1))
    metrics.read("orca_engine_ready", of_each(lambda master: master.unready is None))
    metrics.read("orca_num_requests_running", of_each(lambda master: len(master.core.requests)))
    metrics.read("orca_kv_cache_usage_perc", of_each(usage))
    metrics.read("orca_slots", slots)
    metrics.read("orca_cache_config_info", caches)
    metrics.read("orca_batches_in_flight", of_each(lambda master: master.core.n_scheduled))
