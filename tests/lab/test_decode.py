"""Decode of whole models is timed in the stage that serves, and beside transformers' own."""

import json
from typing import Any

import pytest

from orca_lab.decode import main

COMMON = ["--model", "llama-small", "--device", "cpu", "--batch", "1", "3", "--context", "20", "--repetitions", "2"]


def rows_of(capsys: pytest.CaptureFixture[str], *more: str) -> list[dict[str, Any]]:
    main([*COMMON, *more])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("more", [[], ["--peer"]], ids=["orca", "peer"])
def test_a_line_for_each_case(capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    measured, ready, *cases = rows_of(capsys, *more)
    assert measured["copy_bytes_per_second"] > 0 < measured["product_flop_per_second"]
    assert ready["ready_seconds"] > 0
    assert [(row["batch"], row["context"]) for row in cases] == [(1, 20), (3, 20)]
    for row in cases:
        assert row["engine"] == ("transformers" if more else "orca")
        assert 0 < row["fastest"] <= row["milliseconds"] <= row["slowest"]
    # q, k, v and o, three matrices of the feed-forward network and two norms a layer; the last norm and the head.
    weights = 4 * (256 * 256 * 2 + 2 * 128 * 256 + 3 * 256 * 704 + 2 * 256) + 256 + 512 * 256
    kept = 4 * 2 * 2 * 64  # elements of the keys and values of a token
    assert [row["bytes"] for row in cases] == [2 * (weights + kept * batch * (20 + 2)) for batch in (1, 3)]


def test_transformers_has_no_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*COMMON, "--peer", "--quantize", "int8"])
    assert "--quantize: transformers, which --peer times, has no codes" in capsys.readouterr().err
