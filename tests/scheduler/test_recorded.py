"""Journals of earlier forms: their events give the same actions now.

`recorded/11-..` to `15-..` are of real stacks under `orca chaos` (losses, cancels, drains, run-ahead), `storm-..` of
random events, at commit 21d5a0c, from before a member was (start, count, samples), without notes. Their form was
fields by position. `long-..` are of 2,000 random events each (`storm` of world.py), at commit 38f77b39, from before an
iteration could give a member several tokens. This test converts both.
"""

import gzip
import json
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from orca_scheduler.core.core import FORM, ScheduleBatch
from orca_scheduler.lifecycle.lifecycle import Lifecycle
from orca_scheduler.lifecycle.places import Shape
from orca_scheduler.master.journal import KINDS, CoreStep, lifecycle_state, replay

FOLDER = Path(__file__).parent / "recorded"
ARRIVAL = (
    "claim",
    "arrival",
    "input_tokens",
    "max_new_tokens",
    "generated",
    "eos_token_ids",
    "stop_token_ids",
    "deadline",
)


def converted(line: dict[str, Any]) -> dict[str, Any]:
    """A line of the old form in the form of now."""
    if "core" in line:
        state = line["state"]
        assert not any(state[part] for part in ("requests", "in_flight", "formed"))
        n_slots, free_blocks, held, free_rows, next_row = state.pop("slots")
        state["memory"] = {"n_slots": n_slots, "free_blocks": free_blocks, "rows": held, "owners": []}
        state["memory"] |= {"free_rows": free_rows, "next_row": next_row}
        state["form"] = FORM
        line["core"]["policy"] = "paper"
        line |= {"term": 1, "clock": {"now": 0.0, "wall": 0}, "claims": {}}
        line["lifecycle"]["state"] = named(line["lifecycle"]["state"])
        return line
    event = "event" if "event" in line else "life"
    return of_runs({event: named(line[event]), "actions": [named(action) for action in line["actions"]]})


def of_runs(step: dict[str, Any]) -> dict[str, Any]:
    """A member samples or does not -> how many outputs it has; a token or none -> a list of tokens."""
    for name, values in [step.get("event", ["", {}]), *step["actions"]]:
        if name == "BatchReturned":
            tokens = values.pop("token_ids", values.get("made"))
            values["made"] = [[] if token is None else [token] for token in tokens]
        if "samples" in values.get("members", {}):
            values["members"]["outputs"] = list(map(int, values["members"].pop("samples")))
    return step


def named(encoded: list[Any]) -> list[Any]:
    """[name, field, ..] -> [name, {field: ..}]"""
    name, *values = encoded
    match name:
        case "ScheduleBatch":
            iteration, members, free_rows, reserved, stop = values
            admitted = sum(phase == "initiation" for _, _, phase, _, _, _ in members)
            columns = {
                "claim": [claim for claim, *_ in members],
                "row": [row for _, row, *_ in members],
                "start": [0 if phase == "initiation" else length - 1 for _, _, phase, length, _, _ in members],
                "count": [length if phase == "initiation" else 1 for _, _, phase, length, _, _ in members],
                "new_blocks": [blocks for *_, blocks in members],
                "token": [token for *_, token, _ in members],
            }
            return [name, {"iteration": iteration, "members": columns, "admitted": admitted, "free_rows": free_rows,
                           "reserved": reserved, "stop": stop}]  # fmt: skip
        case "Commit":
            iteration, outcomes = values
            names = ("claim", "base", "token", "finish")
            columns = {column: [outcome[n] for outcome in outcomes] for n, column in enumerate(names)}
            return [name, {"iteration": iteration, "outcomes": columns}]
        case "Arrived":
            now, requests = values
            return [name, {"now": now, "requests": [dict(zip(ARRIVAL, one, strict=True)) for one in requests]}]
        case _:
            names = [field.name for field in fields(KINDS[name])][: len(values)]  # later ones have defaults
            return [name, dict(zip(names, values, strict=True))]


def headed(line: dict[str, Any]) -> dict[str, Any]:
    """With a lifecycle, which has no steps here."""
    life = lifecycle_state(Lifecycle("engine-0", Shape(1, 1, 1, block_size=4), None))
    state = line["state"] | {"form": FORM}
    return line | {"state": state, "lifecycle": life, "term": 1, "clock": {"now": 0.0, "wall": 0}, "claims": {}}


def test_there_are_thirty() -> None:
    assert len(list(FOLDER.iterdir())) == 30


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir()))
def test_it_replays_to_the_same_actions(tmp_path: Path, name: str) -> None:
    lines = [json.loads(line) for line in gzip.decompress((FOLDER / name).read_bytes()).splitlines()]
    lines = [headed(lines[0]), *map(of_runs, lines[1:])] if name.startswith("long") else list(map(converted, lines))
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    kinds: Counter[str] = Counter()
    for step, again in replay(path):
        assert tuple(again) == step.actions, step.event
        kinds[type(step.event).__name__] += 1
        if isinstance(step, CoreStep):
            kinds["batches"] += sum(isinstance(action, ScheduleBatch) for action in step.actions)
    assert kinds.total() - kinds["batches"] == len(lines) - 1
    assert kinds["batches"] > 20
