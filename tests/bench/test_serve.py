"""`orca bench` as a reader runs it: against whole stacks through both doors, and alone."""

import asyncio
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_gpt2, make_timed
from stacks import running
from typer.testing import CliRunner

from orca_bench import ceilings
from orca_bench.cases import dump, fixed
from orca_cli.main import app


@dataclass(frozen=True)
class Ran:
    """A command that has ended."""

    status: int
    output: str
    errors: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.splitlines()]


async def bench(*words: object) -> Ran:
    command = [sys.executable, "-m", "orca_cli", "bench", *map(str, words)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Ran(process.returncode, output.decode(), errors.decode())


NUMBERS = ("normalized_latency_ms_p50", "normalized_latency_ms_p99", "first_token_ms_p50", "requests_per_s")


async def test_both_doors_of_a_stack_take_the_same_load(tmp_path: Path) -> None:
    model = make_gpt2(
        tmp_path / "model",
        heads=2,
        layers=1,
        hidden=16,
        vocab=300,
        positions=64,
        seed=3,
        tokenizer=True,
        eos_token_id=5,
    )
    load = ["--rates", "50,200", "--requests", 20, "--seed", 4, "--lengths", "2-30,1-20", "--vocab-size", 256]
    async with running(tmp_path / "run", model, max_batch_size=4) as stack:
        picture, kept = tmp_path / "curve.svg", tmp_path / "grpc.jsonl"
        grpc = await bench("serve", "--address", stack.grpc, *load, "--plot", picture, "--json-file", kept)
        http = await bench("serve", "--openai", f"http://{stack.http}/v1", *load, "--label", "http")
        journal = [
            arrival for line in stack.journal() for arrival in getattr(getattr(line, "event", None), "requests", ())
        ]
    for ran, name in ((grpc, "orca-grpc"), (http, "http")):
        assert ran.status == 0, ran.errors
        assert [(line["engine"], line["rate"], line["requests"], line["errors"]) for line in ran.lines] == [
            (name, 50.0, 20, 0),
            (name, 200.0, 20, 0),
        ]
        assert all(line[number] > 0 for line in ran.lines for number in NUMBERS)
    # the end-of-sequence token ended nothing, and both doors were asked for the same
    assert [line["output_tokens"] for line in grpc.lines] == [line["output_tokens"] for line in http.lines]
    wanted = sorted((a.input_tokens, a.max_new_tokens) for a in journal)
    assert len(wanted) == 2 * (2 * 20 + 4) + 1, (
        "each load twice, a warm-up of each door, and the first question of HTTP"
    )
    assert [json.loads(line) for line in kept.read_text().splitlines()] == grpc.lines
    assert picture.read_text().count("<circle") == 2

    other = tmp_path / "http.jsonl"
    other.write_text(http.output)
    drawn = await bench("plot", kept, other, "--out", tmp_path / "both.svg")
    assert drawn.status == 0, drawn.errors
    assert (tmp_path / "both.svg").read_text().count("<circle") == 4


@pytest.mark.long
async def test_closed_cases_through_the_stack(tmp_path: Path) -> None:
    model, cases = make_timed(tmp_path / "model", vocab=300, tokenizer=True), tmp_path / "cases.json"
    cases.write_text(dump({"one": fixed(1, 4, 6, vocabulary=range(9)), "six": fixed(6, 4, 3, vocabulary=range(9))}))
    async with running(tmp_path / "run", model) as stack:
        batch = await bench("serve", "--address", stack.grpc, "--batch", 3, "--input", 5, "--output", 7, "--runs", 2)
        named = await bench(
            *("serve", "--openai", stack.http, "--cases", cases, "--case", "six", "--case", "one"),
            *("--runs", 1, "--vocab-size", 256),
        )
        # more than fits: every request is refused, and the refusal is the server's own sentence
        refused = await bench("serve", "--address", stack.grpc, "--batch", 2, "--input", 5, "--output", 5000)
        counted = await bench(
            *("serve", "--address", stack.grpc, "--rate", 100, "--requests", 5, "--lengths", "3,4-5000", "--seed", 1)
        )
    assert batch.status == named.status == 0, batch.errors + named.errors
    assert [(line["case"], line["run"], line["requests"], line["output_tokens"]) for line in batch.lines] == [
        ("b3_5_7", 1, 3, 21),
        ("b3_5_7", 2, 3, 21),
    ]
    assert [(line["engine"], line["case"], line["output_tokens"]) for line in named.lines] == [
        ("openai", "six", 18),
        ("openai", "one", 6),
    ]
    assert refused.status == 1
    assert not refused.output
    assert "Traceback" not in refused.errors
    assert re.match(r"2 of 2 requests failed, the first with: INVALID_ARGUMENT: .*2048", refused.errors.strip())
    assert counted.status == 0, counted.errors
    [line] = counted.lines
    assert 0 < line["errors"] <= 5, "lengths up to 5000 do not fit 2048 positions"
    assert line["error"].startswith("INVALID_ARGUMENT")
    warned = r"--lengths: \S+ has requests of up to \d+ tokens; the model has 2048 positions, so some will fail"
    assert re.search(warned, counted.errors)


def test_the_engine_and_a_peer_in_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cases = tmp_path / "model", tmp_path / "cases.json"
    make_gpt2(model, heads=2, layers=1, hidden=16, vocab=97, positions=64, seed=3)
    cases.write_text(dump({"small": fixed(2, 4, 3, vocabulary=range(97))}))
    options = ["--model", model, "--cases", cases, "--dtype", "float32", "--threads", 1, "--device", "cpu"]
    words = ["bench", "engine", *map(str, options), "--runs", "2", "--json-file", str(tmp_path / "alone.jsonl")]
    alone = CliRunner().invoke(app, words)
    assert alone.exit_code == 0, alone.stderr
    lines = [json.loads(line) for line in alone.stdout.splitlines()]
    assert [(line["case"], line["output_tokens"], line["iterations"]) for line in lines] == [("small", 6, 3)] * 2
    assert (tmp_path / "alone.jsonl").read_text() == alone.stdout

    said = [{"engine": "peer", "case": case, "seconds": 1000.0} for case in ("small", "other")]
    peer = "; ".join(["echo loading", *(f"echo '{json.dumps(line)}'" for line in said)])
    kept = tmp_path / "rounds.jsonl"
    words = ["bench", "compare", *map(str, options), "--peer", peer, "--rounds", "1", "--json-file", str(kept)]
    monkeypatch.setattr(sys, "argv", ["orca", *words])
    monkeypatch.setattr(ceilings, "READ_BYTES", 4 << 20)
    monkeypatch.setattr(ceilings, "LONG", 0.0)
    both = CliRunner().invoke(app, words)
    assert both.exit_code == 0, both.stderr
    command, about, head, _, row = (line for line in both.stdout.splitlines() if line)
    assert command.startswith("`orca bench compare --model ")
    assert re.search(r"instruction set \w+; model, orca in float32 with 1 thread. Medians of 1 rounds", about)
    assert re.search(r"[\d.]+ GB/s read, [\d.]+ TFLOP/s in float32", about)
    assert head == "| case | orca, s | peer, s | peer / orca | floor, s | orca / floor |"
    assert re.fullmatch(r"\| small \| 0\.\d+ \| 1000\.000 \| \d+\.\d+ \| 0\.000 \| \d+\.\d+ \|", row)
    found = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [(line["engine"], line["round"]) for line in found] == [("orca", 1), ("peer", 1)]


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("serve --rate 1", 2, "name one server"),
        ("serve --address a:1 --openai http://b --rate 1", 2, "name one server"),
        ("serve --address a:1", 2, "say what to send"),
        ("serve --address a:1 --rate 1 --batch 2", 2, "say what to send"),
        ("serve --address a:1 --batch 2 --plot x.svg", 2, "is for --rate and --rates"),
        ("serve --address a:1 --rates 1,x", 2, "numbers above 0"),
        ("serve --address a:1 --rates 0,1", 2, "numbers above 0"),
        ("serve --openai https://b --rate 1", 1, "is not an address"),
        ("engine --dtype int8", 1, "dtype: is int8; there are float32, bfloat16"),
        ("engine --case none", 1, "there is no none; there are b1_32_32,"),
        ("engine --case paper64", 1, "needs 639 positions; the model has 512"),
        ("engine --model /none", 1, "there is no such folder"),
        ("engine --cases /none", 1, "is not a file of cases"),
        ("compare --peer false --case none", 1, "there is no none; there are b1_32_32,"),
        ("plot /none --out x.svg", 1, "no file of JSON lines"),
    ],
)
def test_wrong_commands_end_with_a_sentence(words: str, status: int, said: str) -> None:
    """In this process, which has torch already. What a process makes of them, the tests above see."""
    ran = CliRunner().invoke(app, ["bench", *words.split()])
    assert ran.exit_code == status, ran.output
    assert isinstance(ran.exception, SystemExit)
    assert said in " ".join(re.sub("[│╭╮╰╯─]", " ", ran.stderr).split())
