"""The driver of `make bench-pool` steps the coroutines of Pool by hand: a change of Pool must not leave it behind."""

from urllib.parse import urlsplit

import pytest

from orca_bench.pool import BATCH, Drive, Spent, server, show


def test_the_pool_is_driven() -> None:
    with server() as url:
        drive = Drive(urlsplit(url).port or 0, 2, 1, 1)
        assert drive.submitted == sum(len(engine.held) for engine in drive.engines) == round(0.9 * 2 * BATCH)
        found = drive.measure(0.1)
        assert found.calls["append"][1] > 20, "APPENDs a commit"
        assert 0 < found.busy < 1.1
        assert found.share * found.commits == pytest.approx(found.busy * 50 * 2), "of 50 rounds of two commits"
        assert sum(len(engine.held) for engine in drive.engines) == round(0.9 * 2 * BATCH), (
            "each is followed by another"
        )
        assert {left for engine in drive.engines for _, _, left in engine.held.values()} <= {*range(1, 129)}
        assert drive.parts(0.05).keys() == {"leases", "commits", "deliveries", "submits", "hints", "claims"}
        assert drive.floor(0.05) > 0
        drive.close()


def test_what_is_printed_of_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the commands the twelve that take longest."""
    calls = {"a": (1.0, 0.125), "b": (3.0, 2.0), **{f"c{n}": (0.25, 1.0) for n in range(11)}}
    show(10, Spent(0.25, 400.0, 0.5, calls), 12.4, {"leases": 1.4, "commits": 20.6})
    rest = ", ".join(f"c{n} 0.2 x 1.00" for n in range(11))
    assert capsys.readouterr().out.splitlines() == [
        "  Redis at full speed: 25.0% of a core, 500 us a commit with all around it",
        "  us a commit by part: leases 1, commits 21",
        "  floor: 12 us for the bytes of a commit and their delivery as plain commands",
        "  engines that a core sustains: 40, derived",
        "  driven: 400 commits a second at 50% of a core, as of 8.0 engines",
        f"  commands, us x how many a commit (evalsha holds the others): b 3.0 x 2.00, {rest}",
    ]
