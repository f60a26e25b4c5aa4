"""Changes the weights under load, by killing ranks that then read others: no stream has tokens of two models.

    python tests/e2e/other_weights.py --rounds 10 [--seed 1] [--engines 2] [--pp 1]

A round streams requests, writes the other of two checkpoints over the one that is served, and kills the ranks of one
engine after the other at random moments. A stream must have the tokens that transformers makes of one checkpoint,
whole; or it ends ABORTED with the reason MODEL_CHANGED, after some of the old one's. While an engine has the old
weights, none may end so.
"""

import argparse
import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from itertools import islice
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from checkpoints import make_gpt2  # noqa: E402
from reference import Reference  # noqa: E402
from stacks import Running, running  # noqa: E402

from orca_client import Accepted, Token  # noqa: E402
from orca_client.errors import Aborted  # noqa: E402

VOCAB, MAX_BS = 211, 2
# By engines: enough for some to run when the last engine changes; a single engine is hit in the first third of two long
# ones, for it is ahead of what has come here.
REQUESTS, TOKENS = {1: 10, 2: 40}, {1: 240, 2: 40}
WEIGHTS = "model.safetensors"


class Rounds:
    """One stack, and two models of the same configuration that it serves by turns."""

    def __init__(self, folder: Path, draw: random.Random, engines: int) -> None:
        self._draw, self._engines = draw, engines
        self._requests, self._tokens = REQUESTS[engines], TOKENS[engines]
        self._kept = [make_gpt2(folder / name, heads=4, layers=2, hidden=24, vocab=VOCAB, positions=280, seed=seed)
                      for seed, name in enumerate("ab")]  # fmt: skip
        self._references = [Reference(kept) for kept in self._kept]
        self._now = 0  # which of the two is served
        self.served = folder / "served"
        shutil.copytree(self._kept[0], self.served)
        self.ends: Counter[str] = Counter()
        self._news = asyncio.Event()  # a token has come, or a stream has ended

    async def round(self, stack: Running) -> None:
        """Changes the weights once, on all engines."""
        old, new = self._references[self._now], self._references[1 - self._now]
        asked = list(islice(old.random(self._draw, (1, 20), (self._tokens, self._tokens)), self._requests))
        before = {engine.weights for engine in (await stack.client.get_model()).engines}
        assert len(before) == 1
        came: list[int] = []
        streams = [asyncio.create_task(self._stream(stack, known.prompt, came)) for known in asked]
        for task in streams:
            task.add_done_callback(lambda _: self._news.set())
        other = self._kept[1 - self._now] / WEIGHTS
        shutil.copy(other, self.served / "part")
        for engine in range(self._engines):
            moment = len(came) + self._draw.randint(1, self._tokens if engine else self._requests * self._tokens // 16)
            name = f"engine-{engine}"
            ranks = [one["pid"] for one in stack.processes() if one["role"] == "rank" and one["engine"] == name]
            while len(came) < moment and not all(task.done() for task in streams):
                self._news.clear()
                await self._news.wait()  # at once: a stream of this model lasts some dozens of milliseconds
            if engine == 0:
                os.replace(self.served / "part", self.served / WEIGHTS)
            assert not any(end is not None for end in ended(streams)), "an engine has the old weights"
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
            await self._formed(stack, name, before)
        results = await asyncio.wait_for(asyncio.gather(*streams), 120)
        for (prompt, olds), (tokens, told, error) in zip(asked, results, strict=True):
            assert told <= before, "a stream that has tokens tells the weights that made them"
            if error is not None:
                assert tokens == olds[: len(tokens)]
                assert 0 < len(tokens) < self._tokens
                self.ends["MODEL_CHANGED"] += 1
            else:
                made_by = "old" if tokens == olds else "new"
                assert made_by == "old" or tokens == new.greedy(prompt, self._tokens), f"{tokens} are of neither model"
                self.ends[made_by] += 1
        self._now = 1 - self._now
        assert before.isdisjoint(engine.weights for engine in (await stack.client.get_model()).engines)

    async def _stream(
        self, stack: Running, prompt: list[int], came: list[int]
    ) -> tuple[list[int], set[str], Aborted | None]:
        """A stream's tokens, the weights that it was told, and why it ended before its end."""
        tokens, told = list[int](), set[str]()
        try:
            async for event in stack.client.generate(prompt, max_new_tokens=self._tokens, ignore_eos=True):
                if isinstance(event, Accepted) and event.weights:
                    told.add(event.weights)
                elif isinstance(event, Token):
                    tokens.append(event.token_id)
                    came.append(event.token_id)
                    self._news.set()
        except Aborted as error:
            if error.reason != "MODEL_CHANGED":
                raise
            return tokens, told, error
        return tokens, told, None

    async def _formed(self, stack: Running, name: str, before: set[str]) -> None:
        """Waits until the engine has formed with other weights than before."""
        async with asyncio.timeout(60):
            while True:
                engines = {engine.id: engine.weights for engine in (await stack.client.get_model()).engines}
                if engines[name] not in before:
                    return
                await asyncio.sleep(0.05)


def ended(streams: list[asyncio.Task[tuple[list[int], set[str], Aborted | None]]]) -> list[Aborted | None]:
    return [task.result()[2] for task in streams if task.done()]


async def rounds_of(folder: Path, rounds: int, seed: int, engines: int, pp: int) -> Counter[str]:
    """Runs rounds on one stack. Returns how many streams ended with which model's tokens, or MODEL_CHANGED."""
    lab = Rounds(folder, random.Random(seed), engines)
    settings = {"engines": engines, "pp": pp, "max_batch_size": MAX_BS, "policy": "paper"}  # a token an iteration
    async with running(folder / "run", lab.served, **settings) as stack:
        for n in range(rounds):
            await lab.round(stack)
            print(f"round {n + 1}: {dict(lab.ends)}", flush=True)
    return lab.ends


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engines", type=int, choices=REQUESTS, default=2)
    parser.add_argument("--pp", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="orca-other-weights-") as temporary:
        ends = asyncio.run(rounds_of(Path(temporary), given.rounds, given.seed, given.engines, given.pp))
    print(f"{given.rounds} rounds passed, no stream has tokens of two models: {dict(ends)}")
