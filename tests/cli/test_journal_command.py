"""`orca journal`: a journal for people, and as it is."""

import json
import random
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from scheduler.life_script import SCRIPT, fresh_lifecycle
from scheduler.world import Asked, World, storm
from typer.testing import CliRunner

from orca_cli import journal as command
from orca_cli.main import app
from orca_scheduler.core.core import (
    Arrived,
    BeginHere,
    Cancelled,
    Drain,
    GiveBack,
    HandedOver,
    HandOver,
    LetGo,
    Measured,
    Pull,
    Pulled,
)
from orca_scheduler.master.journal import Heading, Journal, parse, path_of


def write(folder: Path, world: World, engine: str = "engine-0", term: int = 1) -> Path:
    """Writes a journal of a world's events, whose requests are named after their claims, and of a lifecycle."""
    path = path_of(folder, engine, term)
    core, life = world.fresh(), fresh_lifecycle()
    journal = Journal(path, core, life, term)
    for event, _ in world.record:
        if isinstance(event, Arrived):
            claims = [one.claim for one in event.requests]
            submitted = dict.fromkeys(claims, 0)
            journal.note(claims={claim: f"r{claim}" for claim in claims}, submitted=submitted, now=event.now)
        journal.core_step(event, core.step(event))
    for life_event in SCRIPT:
        journal.life_step(life_event, life.step(life_event))
    journal.note(iteration=1, times=[[0, 0, 0, 0, 1_000_000, 3_500_000, 0, 0, 0, 0]])
    journal.close()
    return path


def shown(*arguments: str) -> list[str]:
    result = CliRunner().invoke(app, ["journal", *arguments])
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def small_world() -> World:
    world = World(2, 1, 4)
    world.form(64)
    world.arrive(Asked(3, 2), Asked(2, 1))
    world.back(5, 6)
    world.back(7)
    return world


def test_one_line_an_event(tmp_path: Path) -> None:
    write(tmp_path, small_world())
    written = shown(str(tmp_path))
    (path,) = tmp_path.iterdir()
    heading = parse(path.read_bytes().splitlines()[0])
    assert isinstance(heading, Heading)
    at = datetime.fromtimestamp(heading.wall / 1e9).strftime("%H:%M:%S.%f")[:12]
    assert written[0].startswith(f"{at}  a journal begins: term 1, 0 requests, {{'max_bs': 2,")
    assert written[-1][:14] == " " * 14, "it does not say when"
    lines = [line[14:] for line in written]
    assert lines[1:6] == [
        "EngineReady (n_slots 64, iteration 1)",
        "claimed: r1, r2",
        "arrived: r1, r2 -> iteration 1: r1 initiation 3, r2 initiation 2 (12 slots; no other request is waiting "
        "for an iteration)",
        "iteration 1 returned, 2 tokens -> iteration 2: r1 increment 1 (8 slots; no other request is waiting for an "
        "iteration) -> commit 2 tokens, ends: r2 LENGTH",
        "iteration 2 returned, 1 tokens -> commit 1 tokens, ends: r1 LENGTH",
    ]
    assert lines[-1] == "iteration 1 computed: stage 0 rank 0 2.50 ms"


WORDS: list[tuple[Any, str]] = [
    (Cancelled(1.0, (1, 9)), "ended elsewhere: r1, claim 9"),
    (HandOver((HandedOver(2, 0, 5),)), "handed over: r2"),
    (Pull(1, 1, 0, 64, (), ()), "pull 64 positions of r1"),
    (Pulled(1.0, 1, True), "pulled: r1"),
    (Pulled(1.0, 1, False), "pulled in vain: r1"),
    (LetGo(1.0, (1, 2)), "let go: r1, r2"),
    (BeginHere((2,), True), "begin here: r2"),
    (GiveBack(((1, False), (2, True))), "give back: r1, r2"),
    (Measured(1.0, 40), "Measured (positions 40)"),
    (Drain(1.0), "Drain"),
    (Cancelled(1.0, tuple(range(10, 20))), "ended elsewhere: " + "".join(f"claim {n}, " for n in range(10, 18))),
]


@pytest.mark.parametrize(("value", "said"), WORDS, ids=[said[:20] for _, said in WORDS])
def test_the_words_of_an_event(value: Any, said: str) -> None:
    found = command.value_words(value, {1: "r1", 2: "r2"})
    assert found == said + "and 2 more" * said.endswith(", ")


def test_json_passes_the_lines(tmp_path: Path) -> None:
    """Of all kinds of events, and each of them has words."""
    path = write(tmp_path, storm(random.Random(4), 200))
    raw = path.read_text().splitlines()
    assert shown(str(path), "--json") == raw
    assert shown(str(tmp_path), "--json", "--last", "3") == raw[-3:]
    assert len(shown(str(tmp_path))) == len(raw)


def test_the_lines_of_one_request(tmp_path: Path) -> None:
    write(tmp_path, small_world())
    lines = [json.loads(line) for line in shown(str(tmp_path), "--request", "r2", "--json")]
    assert [next(iter(line)) for line in lines] == ["note", "event", "event"]
    result = CliRunner().invoke(app, ["journal", str(tmp_path), "--request", "stranger"])
    assert result.exit_code == 1
    assert "stranger" in result.output


def test_engines_and_terms_follow_each_other(tmp_path: Path) -> None:
    for engine, term in (("engine-1", 2), ("engine-0", 10), ("engine-0", 9)):
        write(tmp_path, small_world(), engine, term)
    begins = [line.split("term ")[1].split(",")[0] for line in shown(str(tmp_path)) if "a journal begins" in line]
    assert begins == ["9", "10", "2"]
    assert sum("a journal begins" in line for line in shown(str(tmp_path), "--engine", "engine-1")) == 1
    result = CliRunner().invoke(app, ["journal", str(tmp_path), "--engine", "engine-7"])
    assert (result.exit_code, "holds no journal of engine-7" in result.output) == (1, True)


def test_it_follows_over_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torn line is read when it is whole, a file that is full under its new name once, and a new term's file."""
    path = write(tmp_path, small_world())
    whole = path.read_bytes()
    monkeypatch.setattr(command, "LOOK", 0)
    lines = command.followed(tmp_path, None)
    count = whole.count(b"\n")
    assert b"".join(next(lines)[1] for _ in range(count)) == whole
    with path.open("ab") as file:
        file.write(b'{"note": {"a": 1')
        file.flush()
        file.write(b'}}\n{"note"')
    assert next(lines) == (path, b'{"note": {"a": 1}}\n')
    with path.open("ab") as file:
        file.write(b': {"a": 2}}\n')
    path.replace(tmp_path / "journal-engine-0-1.1.jsonl")
    path.write_bytes(b'{"note": {"a": 3}}\n')
    path_of(tmp_path, "engine-0", 2).write_bytes(b'{"note": {"a": 4}}\n')
    assert [json.loads(next(lines)[1])["note"]["a"] for _ in range(3)] == [2, 3, 4]
