"""Each form of a recorded trace is read as it is published, and a broken row is named by file, line and column."""

from pathlib import Path

import pytest

from orca_common.errors import FailedPrecondition, InvalidArgument
from orca_lab.traces import Trace, in_order, read, write
from orca_lab.workload import PAPER, POISSON, Asked, Seeds, drawn
from orca_scheduler.core.core import Arrived, BatchReturned, Core, EngineReady
from orca_scheduler.core.request import Arrival
from orca_scheduler.lifecycle.lifecycle import Lifecycle, Shape
from orca_scheduler.master.journal import Journal

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 02:00:01.009930+02:00,2399,6
"""
BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""
BURST_GPT_8 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5.5,1,2.25,ChatGPT,472,18,490,Conversation log
6.0,,3.0,GPT-4,417,276,693,API log
"""
MOONCAKE = """{"timestamp": 1500, "input_length": 1030, "output_length": 4, "hash_ids": [46, 47, 48]}
{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [46, 50]}
"""
OWN = "at,input_tokens,output_tokens\n0.0,5,6\n0.25,7,8\n"


def made(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "requests", "changes"),
    [
        (AZURE_2023, [(0.0, 374, 44), (4.314579, 396, 109)], []),
        (AZURE_2024, [(0.0, 2162, 5), (1.0, 2399, 6)], []),
        (
            BURST_GPT,
            [(0.0, 472, 18), (113.0, 417, 276)],
            ["1 of 3 rows without tokens in or out left out: failures"],
        ),
        (BURST_GPT_8, [(0.0, 472, 18), (0.5, 417, 276)], []),
        (
            MOONCAKE,
            [(0.0, 600, 2, (46, 50)), (1.5, 1030, 4, (46, 47, 48))],
            ["1 rows were before the one above them, and sorted"],
        ),
        (OWN, [(0.0, 5, 6), (0.25, 7, 8)], []),
        ("\ufeff" + OWN.replace("\n", "\r\n"), [(0.0, 5, 6), (0.25, 7, 8)], []),
    ],
)
def test_published_forms(tmp_path: Path, text: str, requests: list[tuple[float, ...]], changes: list[str]) -> None:
    trace = read(made(tmp_path, text))
    assert [one.at for one in trace.requests] == pytest.approx([one[0] for one in requests], abs=1e-6)
    assert [one[1:4] for one in trace.requests] == [tuple((*one[1:], ())[:3]) for one in requests]
    assert list(trace.changes) == changes


def test_our_form_round_trips(tmp_path: Path) -> None:
    workload = drawn(PAPER, POISSON, 3, 200, Seeds.of(1))
    write(tmp_path / "own.csv", workload)
    assert list(read(tmp_path / "own.csv").requests) == workload


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (AZURE_2023.replace("396", "x"), "line 3, column 'ContextTokens': is 'x', which is no number of tokens"),
        (
            AZURE_2023.replace("2023-11-16 18:15:50", "noon"),
            "line 3, column 'TIMESTAMP': is 'noon.9951690', which is no",
        ),
        (AZURE_2024 + "2024-05-10 00:00:00,1\n", "line 4, column 'GeneratedTokens': is missing"),
        (BURST_GPT.replace("118", "nan"), "line 4, column 'Timestamp': is 'nan', which is no time"),
        (BURST_GPT.replace("276", "-1"), "line 4, column 'Response tokens': is '-1'"),
        (BURST_GPT.replace("API log", "API log,more"), "line 4, column 7: has no name"),
        (MOONCAKE + '{"timestamp": 1', "line 3, column 16: is no JSON"),
        (MOONCAKE + "[1]\n", "line 3, column 1: is no JSON object"),
        (MOONCAKE.replace("[46, 50]", "[46, 1.5]"), "line 2, column 'hash_ids': is [46, 1.5]"),
        (MOONCAKE.replace('"output_length": 2', '"output_length": true'), "line 2, column 'output_length': is True"),
        (OWN + "\n1.0,2.5,1\n", "line 5, column 'input_tokens': is '2.5'"),
        ("a,b\n1,2\n", "line 1: is no form that is known"),
        ("", "line 1: is no form that is known"),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = made(tmp_path, text)
    with pytest.raises(InvalidArgument) as refused:
        read(path)
    assert f"trace: {path}, {said}" in str(refused.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="cannot be read"):
        read(tmp_path / "absent.csv")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FailedPrecondition, match="cannot be read"):
        read(tmp_path / "bytes")


def test_every_change_is_counted() -> None:
    trace = in_order([Asked(10 + n, 10 * n + 1, 10) for n in range(10)])
    assert [one.at for one in trace.requests] == list(range(10))
    assert trace.cut(2, 5) == Trace(
        tuple(Asked(n - 2.0, 10 * n + 1, 10) for n in (2, 3, 4)), ("cut to 2 .. 5 s: 7 left out",)
    )
    assert [one.at for one in trace.faster(4).requests] == [n / 4 for n in range(10)]
    assert trace.faster(4).changes == ("4 times as fast: 10 moved",)
    dropped = trace.fit(51)
    assert [one.input_tokens for one in dropped.requests] == [1, 11, 21, 31, 41]
    assert dropped.changes == ("fitted to 51 tokens: 5 dropped",)
    clipped = trace.fit(51, clip=True)
    assert {(one.tokens, one.output_tokens) for one in clipped.requests[5:]} == {(51, 10)}
    assert clipped.changes == ("fitted to 51 tokens: 5 clipped",)
    assert all(one.tokens <= 6 and min(one[1:3]) >= 1 for one in trace.fit(6, clip=True).requests)
    both = in_order(drawn(PAPER, POISSON, 1, 2000, Seeds.of(1))).thin(0.25, seed=3).cut(0, 400)
    assert both.changes[0].startswith("thinned to 0.25: ")
    assert len(both.changes) == 2
    assert 60 < len(both.requests) < 140


def test_a_journal_is_a_trace(tmp_path: Path) -> None:
    """Arrivals are submissions; outputs are the tokens that came; a request that began again is one request."""
    core, path = Core(4, 1, 16), tmp_path / "journal-engine-0-1.jsonl"
    journal = Journal(path, core, Lifecycle("engine-0", Shape(1, 1, 1, 16, 0), None))

    def step(event: EngineReady | Arrived | BatchReturned) -> None:
        journal.core_step(event, core.step(event))

    step(EngineReady(1.0, 1000, 1))
    journal.note(now=2.0, claims={1: "a", 2: "b"}, submitted={1: 50_000_000, 2: 51_500_000})
    step(Arrived(2.0, (Arrival(1, 1, 20, 2), Arrival(2, 2, 30, 5, eos_token_ids=(0,)))))
    step(BatchReturned(3.0, 1, ((7,), (0,))))  # b ends by its token, before its length
    step(BatchReturned(4.0, 2, ((7,),)))
    journal.note(now=5.0, claims={3: "a"}, submitted={3: 50_000_000})
    step(Arrived(5.0, (Arrival(3, 1, 20, 4, generated=2),)))
    step(BatchReturned(6.0, 3, ((7,),)))
    journal.close()
    assert read(path).requests == (Asked(0.0, 20, 3), Asked(1.5, 30, 1))
    write(tmp_path / "own.csv", read(path).requests)
    assert read(tmp_path / "own.csv") == read(path)
