"""`orca top` and the load of `orca status`: what two looks at metrics say of engines, and what keys do."""

import io
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from orca_cli.killing import Watched, named
from orca_cli.looking import EngineSight, Look, engines, mean, ports, rate
from orca_cli.top import View, bar, read_keys
from orca_common.errors import FailedPrecondition

BEFORE = Look(
    10.0,
    (),
    ({"engines": {"engine-1": None, "engine-0": None}},),
    (),
    values={
        "orca_batch_size_count": {("engine-0",): 10.0},
        "orca_batch_size_sum": {("engine-0",): 30.0},
        "orca_engine_tokens_total": {("engine-0",): 100.0},
        "orca_stage_busy_seconds_total": {("engine-0", "0"): 1.0, ("engine-0", "10"): 1.0},
        "orca_engine_active_seconds_total": {("engine-0",): 1.0},
        "orca_time_to_first_token_seconds_count": {(): 4.0},
        "orca_time_to_first_token_seconds_sum": {(): 1.0},
        "orca_request_success_total": {("length",): 1.0},
        "orca_request_errors_total": {("a",): 1.0},
    },
)
NOW = Look(
    12.0,
    ("127.0.0.1:1: away",),
    ({"engines": {"engine-1": "a pod is missing", "engine-0": None}},),
    (),
    values={
        "orca_batch_size_count": {("engine-0",): 14.0},
        "orca_batch_size_sum": {("engine-0",): 40.0},
        "orca_engine_tokens_total": {("engine-0",): 150.0},
        "orca_stage_busy_seconds_total": {("engine-0", "10"): 2.0, ("engine-0", "0"): 1.5},
        "orca_engine_active_seconds_total": {("engine-0",): 2.5},
        "orca_num_requests_running": {("engine-0",): 3.0, ("engine-1",): 9.0},
        "orca_batches_in_flight": {("engine-0",): 2.0},
        "orca_slots": {("engine-0", "reserved"): 48.0, ("engine-0", "free"): 16.0},
        "orca_num_requests_waiting": {(): 5.0},
        "orca_queue_oldest_age_seconds": {(): 1.5},
        "orca_time_to_first_token_seconds_count": {(): 6.0},
        "orca_time_to_first_token_seconds_sum": {(): 2.0},
        "orca_request_success_total": {("length",): 3.0, ("eos",): 2.0},
        "orca_request_errors_total": {("a",): 2.0},
        "orca_refusals_total": {("b",): 2.0},
        "orca_generation_tokens_total": {(): 20.0},
    },
)


def test_an_engine_between_two_looks() -> None:
    """By its name: what it has now, and what has grown, a second."""
    first, second = engines(BEFORE, NOW)
    assert first == EngineSight(
        name="engine-0",
        trouble=None,
        running=3,
        batch=2.5,
        in_flight=2,
        reserved=48,
        slots=64,
        iterations=2.0,
        tokens=25.0,
        busy=(0.25, 0.5),
        bubble=(0.5, 0.25),
    )
    assert (second.name, second.trouble, second.running) == ("engine-1", "a pod is missing", 9)
    assert (second.batch, second.iterations, second.busy) == (0.0, 0.0, ())
    assert (rate(BEFORE, NOW, "orca_engine_tokens_total"), rate(NOW, BEFORE, "orca_engine_tokens_total")) == (25, 0)
    assert mean(BEFORE, NOW, "orca_time_to_first_token_seconds") == 0.5
    assert mean(NOW, NOW, "orca_time_to_first_token_seconds") is None


def test_which_ports_are_looked_at(tmp_path: Path) -> None:
    rows = [{"role": role, "status": status} for role, status in (("endpoint", "a"), ("scheduler", ""), ("redis", "b"))]
    (tmp_path / "processes.json").write_text(json.dumps(rows))
    assert ports(tmp_path, ()) == ["a"]
    assert ports(None, ("x", "y")) == ["x", "y"]
    with pytest.raises(FailedPrecondition, match=r"^nothing runs in /nowhere$"):
        ports(Path("/nowhere"), ())


def lines_of(view: View, height: int = 40) -> list[str]:
    shown = io.StringIO()
    Console(file=shown, width=160).print(view.drawn(height))
    return [" ".join(line.split()) for line in shown.getvalue().splitlines()]


def test_the_screen() -> None:
    now = time.time()
    requests = tuple(
        {"request": f"r{n}", "engine": "engine-0", "submitted": now + 9, "tokens": n, "max_new_tokens": 8}
        | {"iterations": n + 1, "state": "decode"}
        for n in range(5)
    )
    view = View(None, (), BEFORE, NOW)
    view.looked(Look(NOW.at, NOW.silent, NOW.schedulers, requests, values=NOW.values))
    assert view.before is NOW
    view.before = BEFORE
    head, silent, columns, first, second, of_requests, *rest = lines_of(view)
    assert head == (
        "queue 5 (oldest 1.5 s) 10 tokens/s 2.0 requests/s 1.5 errors/s first token 500 ms between tokens -"
    )
    assert silent == "no answer from 127.0.0.1:1: away"
    assert columns == "engine running batch in flight slots iterations/s tokens/s stages"
    assert first == "engine-0 3 2.5 2 48/64 2.0 25 ██░░░░░··· 25% busy 50% bubble █████░░··· 50% busy 25% bubble"
    assert second == "engine-1 a pod is missing"
    assert of_requests == "the oldest requests engine age tokens of iterations state"
    assert rest[:2] == ["r0 engine-0 0.0 s 0 8 1 decode", "r1 engine-0 0.0 s 1 8 2 decode"]
    assert rest[-1] == "up/down choose · enter explains · esc goes back · q ends"
    for key in ("up", "down", "down", "down", "nothing"):
        view.press(key)
    assert (view.chosen, view.cursor) == ("r3", 3)
    assert [line.split()[0] for line in lines_of(view, 13)[6:-1]] == ["r1", "r2", "r3"], "the cursor stays in sight"
    for _ in range(9):
        view.press("down")
    assert view.chosen == "r4"


def test_bars() -> None:
    assert [bar(0.25, 0.5), bar(0, 0), bar(1, 1)] == ["██░░░░░···", "·" * 10, "█" * 10]


def test_keys() -> None:
    assert read_keys(b"\x1b[A\x1b[Bkj\r\nex\x1bOA\x1bOB\x1bq") == [
        *("up", "down", "up", "down", "explain", "explain", "explain", "up", "down", "back", "end"),
    ]


@contextmanager
def scheduler(told: Mapping[str, Any]) -> Iterator[str]:
    """The status port of one that knows these requests."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, _, query = self.path.partition("?request=")
            assert path == "/explain"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(told.get(query, {"error": f"{query} is not known here"})).encode())

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_the_request_under_the_cursor_is_explained() -> None:
    """By the scheduler that has seen the most of it; each sentence behind the moment at which its part began."""
    parts = [{"begin": 0.0, "sentence": "it waited."}, {"begin": 12.5, "sentence": "it ran."}]
    known = {"request": "r1", "sentence": "r1 took 20 s.", "parts": parts}
    look = Look(1.0, (), (), ({"request": "r0"}, {"request": "r1"}))
    with (
        scheduler({"r1": known | {"unseen": 3.0, "sentence": "less"}}) as first,
        scheduler({"r1": known | {"unseen": 0.0}}) as second,
    ):
        view = View(None, [first, "127.0.0.1:1", second], look, look, chosen="r1")
        view.press("explain")
        assert view.story == ["r1 took 20 s.", "  +0.0 ms  it waited.", "+12.500 s  it ran."]
        assert lines_of(view)[0] == "r1 took 20 s."
        view.press("down")
        assert view.chosen == "r1", "a story has no cursor"
        view.press("back")
        assert view.story == []
        view.press("up")
        view.press("explain")
        (gone,) = view.story
    assert gone.startswith(f"r0: there is no such request: {first}: r0 is not known here; 127.0.0.1:1: ")
    assert gone.endswith(f"; {second}: r0 is not known here")


def test_what_the_demo_of_kills_has_seen(tmp_path: Path) -> None:
    """A process that has another pid than before was killed; one without a pid is not shown yet."""
    rows: list[dict[str, Any]] = [
        {"role": "rank", "rank": 1, "pid": 5},
        {"role": "endpoint", "name": "endpoint-0", "pid": 6},
        {"role": "redis", "pid": None},
    ]
    assert [named(row) for row in rows] == ["rank 1", "endpoint-0", "redis"]
    watched = Watched()
    file = tmp_path / "processes.json"
    file.write_text(json.dumps(rows))
    watched.look(tmp_path)
    assert (watched.pids, watched.killed) == ({"rank 1": 5, "endpoint-0": 6}, [])
    rows[0]["pid"], rows[2]["pid"] = 7, 8
    file.write_text(json.dumps(rows))
    watched.look(tmp_path)
    assert (watched.pids, watched.killed) == ({"rank 1": 7, "endpoint-0": 6, "redis": 8}, ["rank 1"])
    watched.text, watched.tokens, watched.longest, watched.ended = "ab", 2, 1.25, "and whole"
    shown = io.StringIO()
    Console(file=shown, width=90).print(watched.shown())
    words = " ".join(shown.getvalue().split())
    assert "2 tokens, longest pause 1.2 s, 1 killed and whole" in words
    assert "process command rank 1 kill -9 7 endpoint-0 kill -9 6 redis kill -9 8" in words
