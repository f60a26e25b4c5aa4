"""The drivers of `make bench-pool` step the coroutines of Pool by hand: a change of Pool must not leave them behind."""

from urllib.parse import urlsplit

from orca_bench.pool import server
from orca_bench.pool_drive import Drive
from orca_bench.pool_sustained import Sustained


def test_the_pool_is_driven_in_both_ways() -> None:
    with server() as url:
        drive = Drive(urlsplit(url).port or 0, 2, 1, 1)
        assert drive.measure(0.1).calls["append"][1] > 20, "APPENDs a commit"
        drive.close()
    with server() as url:
        sustained = Sustained(urlsplit(url).port or 0, 2, 1, 1)
        found = sustained.measure(0.4)
        sustained.close()
    assert found.rows > 20
    assert found.claim > 0, "requests came and were claimed"
