"""The numbers of a load, from moments that are known."""

import pytest

from orca_bench.cases import Request
from orca_bench.measures import Answer, summary


def answer(due: float, sent: float, came: list[float], ended: float, error: str = "") -> Answer:
    tokens = len(came)
    return Answer(Request([1], tokens), due, sent, came, tokens, ended, error)


def test_one_request() -> None:
    one = answer(due=2.0, sent=2.5, came=[3.0, 3.25, 4.0], ended=5.0)
    assert one.latency == 3.0, "from the moment at which it was due, not from when it was sent"
    assert one.normalized == 1.0
    assert one.first_token == 1.0
    assert one.gaps == [0.25, 0.75]
    assert Answer(Request([1], 1), 0.0).first_token is None


def test_a_load() -> None:
    answers = [
        answer(0.0, 0.0, [0.5], 0.5),  # 500 ms a token
        answer(1.0, 1.001, [1.25, 1.75], 2.0),  # 500
        answer(2.0, 2.003, [2.5, 3.0, 3.5, 4.0], 6.0),  # 1000
        answer(3.0, 3.002, [3.5], 3.5, "UNAVAILABLE: away"),
        answer(3.0, 3.002, [], 8.0, "UNAVAILABLE: away"),
        answer(3.0, 3.0, [], 3.1, "another"),
    ]
    assert summary(answers) == {
        "seconds": 8.0,  # until the last end, a failed one too
        "requests": 6,
        "errors": 3,
        "output_tokens": 7,
        "requests_per_s": 0.375,
        "output_tokens_per_s": 0.9,
        "normalized_latency_ms_p50": 500.0,
        "normalized_latency_ms_p99": 1000.0,
        "first_token_ms_p50": 500.0,
        "first_token_ms_p99": 500.0,
        "gap_ms_p50": 500.0,
        "gap_ms_p99": 500.0,
        "sent_late_ms_p50": 1.5,
        "sent_late_ms_p99": 3.0,
        "error": "UNAVAILABLE: away",
    }


def test_the_99th_percentile_is_a_value_of_its_own() -> None:
    answers = [answer(0.0, 0.0, [n / 1000], n / 1000) for n in range(1, 201)]
    found = summary(answers)
    assert (found["normalized_latency_ms_p50"], found["normalized_latency_ms_p99"]) == (100.5, 198.0)


def test_a_load_that_fails_whole_has_no_latency() -> None:
    found = summary([answer(0.0, 0.0, [], 1.0, "refused")])
    assert (found["errors"], found["requests_per_s"], found["normalized_latency_ms_p50"]) == (1, 0.0, None)
    assert summary([])["requests_per_s"] is None


def test_a_late_client_is_marked() -> None:
    on_time, late = answer(0.0, 0.02, [0.5], 0.5), answer(0.0, 0.0213, [0.5], 0.5)
    assert "disturbed" not in summary([on_time] * 99 + [late])
    assert summary([on_time] * 98 + [late] * 2)["disturbed"] == "arrivals were 21 ms late at p99"


@pytest.mark.parametrize("count", [1, 2])
def test_a_request_without_gaps(count: int) -> None:
    found = summary([answer(0.0, 0.0, [0.5], 0.5)] * count)
    assert found["gap_ms_p50"] is None
    assert "error" not in found
