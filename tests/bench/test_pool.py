"""The driver of `make bench-pool` steps the coroutines of Pool by hand: a change of Pool must not leave it behind."""

from urllib.parse import urlsplit

from orca_bench.pool import Drive, server


def test_the_pool_is_driven() -> None:
    with server() as url:
        drive = Drive(urlsplit(url).port or 0, 2, 1, 1)
        assert drive.measure(0.1).calls["append"][1] > 20, "APPENDs a commit"
        drive.close()
