"""A sample of `make fuzz`: the corpus and some changes of it, for each parser that takes bytes from outside."""

import asyncio
import json
import random
from collections.abc import Iterator, Mapping

import pytest
from fuzz.mutations import mutated
from fuzz.targets import CORPUS, Target, corpus, targets
from properties import examples

NAMES = sorted(path.name for path in CORPUS.iterdir())
COUNT = examples(200)


@pytest.fixture(scope="module")
def parsers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Target]]:
    with asyncio.Runner() as runner, targets(tmp_path_factory.mktemp("fuzz"), runner) as made:
        yield made


def test_every_parser_has_a_corpus(parsers: Mapping[str, Target]) -> None:
    assert sorted(parsers) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_sample(name: str, parsers: Mapping[str, Target]) -> None:
    inputs, chance = corpus(name), random.Random(name)
    for raw in inputs:
        parsers[name](raw)
    for _ in range(COUNT):
        parsers[name](mutated(chance.choice(inputs), inputs, chance))


@pytest.mark.parametrize("count", [450, 3000], ids=["a body for the loop", "one for a thread"])
def test_many_messages_hold_up_no_loop(parsers: Mapping[str, Target], count: int) -> None:
    body = {"messages": count * [{"role": "user", "content": "hi"}]}
    request = {"method": "POST", "target": "/tokenize", "headers": {"Content-Type": "application/json"}, "body": body}
    parsers["http"](json.dumps(request).encode())
