"""The bench of adapters on a small model."""

from orca_bench.adapters import lines, matrices


def test_each_way_is_timed() -> None:
    found = list(lines(rows=3, rank=4, threads=1, turns=2, hidden=512, layers=1))
    assert [line["adapters"] for line in found] == ["alone", "one adapter", "each row its own"]
    numbers = sum(4 * (outputs + inputs) for outputs, inputs in matrices(512).values())
    assert [line["adapters_MB"] for line in found] == [round(n * 2 * numbers / 1e6, 1) for n in (0, 1, 3)]
    assert found[0]["throughput"] == 1
    for line in found:
        least, median = line["thread_ms"]
        assert 0 < least <= median
