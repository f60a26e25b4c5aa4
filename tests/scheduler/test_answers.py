"""Answers of ranks and supervisors: which of them cannot be, and a greeting as the lifecycle knows it."""

from typing import Any

import pytest

from orca.v1 import worker_pb2 as pb
from orca_scheduler.lifecycle.events import Formation, Hello, Model, Standing
from orca_scheduler.ranks.answers import problem_of_hello, problem_of_table
from orca_scheduler.ranks.rank import hello_of


def test_the_answer_to_a_greeting() -> None:
    place = {"tensor_parallel": 2, "pipeline_parallel": 3, "stage": 1, "tensor_rank": 0, "block_size": 16}
    formation = pb.Formation(**place, return_tokens=False, hands_over=True)
    answer = pb.HelloResponse(
        **{"protocol": 9, "host": "here", "pid": 77, "epoch": 4, "iteration": 30, "slots": 96, "weights": "w"},
        **{"model_digest": "d", "max_positions": 64, "vocab_size": 97, "can": ["a", "b"], "formation": formation},
        rows=[pb.HeldRow(row=row) for row in (5, 1, 3)],
    )
    assert hello_of(1.5, 2, 3, answer) == Hello(
        *(1.5, 2, 3, "here", 77),
        Standing(4, 30, 96, (1, 3, 5), Formation(2, 3, 1, 0, 16, False, True)),
        Model("d", 64, 97, ("a", "b")),
        *(9, "w"),
    )


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"epoch": 1 << 52, "iteration": 1 << 52, "slots": 1 << 26, "can": ["x"] * 64, "host": "h" * 300}, None),
        ({"epoch": (1 << 52) + 1}, f"epoch {(1 << 52) + 1}, which no pool gives"),
        ({"iteration": (1 << 52) + 1}, f"iteration {(1 << 52) + 1}, which no pool gives"),
        ({"slots": (1 << 26) + 1}, f"{(1 << 26) + 1} slots, and an engine has {1 << 26} at most"),
        ({"can": ["x"] * 65}, "65 words of what it can"),
        *(
            ({name: "x" * 301}, "a name of 301 characters")
            for name in ("incarnation", "host", "model_digest", "weights")
        ),
        ({"blocks": pb.BlockSource(address="x" * 301)}, "a name of 301 characters"),
        ({"can": ["x" * 301]}, "a name of 301 characters"),
    ],
)
def test_an_answer_that_cannot_be(fields: dict[str, Any], problem: str | None) -> None:
    assert problem_of_hello(pb.HelloResponse(**fields)) == problem


@pytest.mark.parametrize(
    ("addresses", "problem"),
    [
        ([(0, "a:1"), (1, "[::1]:65535"), (2, "x" * 298 + ":1")], None),
        ([(1, "a:1"), (1, "b:1")], "rank 1 twice"),
        ([(0, "x" * 299 + ":1")], "an address of 301 characters"),
        *(([(0, wrong)], f"the address {wrong!r}") for wrong in ("a", ":1", "a:0", "a:65536", "a\n:1", "a:x")),
    ],
)
def test_a_table_that_cannot_be(addresses: list[tuple[int, str]], problem: str | None) -> None:
    entries = [pb.RankEntry(local_rank=number, address=address) for number, address in addresses]
    assert problem_of_table(entries) == problem
