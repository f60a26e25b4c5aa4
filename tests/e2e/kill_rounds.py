"""Kills and freezes ranks under load, at random moments: no request's tokens change, no other process ends.

    python tests/e2e/kill_rounds.py --rounds 30 [--seed 1] [--tp 2] [--pp 2] [--run-ahead 1] [--dtype bfloat16]
                                    [--family llama] [--policy balanced,positions=9 --slots 160]
                                    [--forms --policy drafts=ngram] [--kv-dtype int8]

A round streams requests, sends SIGKILL or SIGSTOP to one rank or to two at once at a random moment, and waits until all
streams have ended. In float32 the tokens must be those of transformers; in bfloat16, with keys and values in eight
bits, and of answers with forms, those that the stack itself makes of each prompt alone before. It prints the parts of
the recovery's time:

verdict         from the signal to the master's verdict
re-formation    from the verdict to the engine's next formation. The rank is forked again and its groups form
re-initiation   from the formation to the first tokens of the new epoch
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

from checkpoints import make_gpt2, make_shape  # noqa: E402
from encoder_decoders import Seq2Seq, make_t5  # noqa: E402
from reference import Reference  # noqa: E402
from stacks import Running, running  # noqa: E402

from orca_scheduler.master.journal import CoreStep, Heading, LifeStep, Line, Note, read, restored, scheduled  # noqa: E402

VOCAB, REQUESTS, NEW_TOKENS, MAX_BS = 211, 8, 40, 2
FORMS = (  # longer than the answers, and such that the next tokens are guessed from the last ones; some have none
    {"regex": "((ab|cd){3} ){20}"},
    {"json_schema": '{"type": "array", "items": {"const": 7}, "minItems": 30}'},
    {},
)
CLASSES = ("urgent", "normal", "low")  # the higher ones take places of the lower ones
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)


@dataclass(frozen=True)
class Recovery:
    """The parts of a round's recovery, in seconds. `sentence` holds the verdicts, which name the ranks."""

    victims: tuple[tuple[int, int], ...]  # stage, tensor rank
    signals: tuple[signal.Signals, ...]
    sentence: str
    verdict: float
    formation: float
    initiation: float

    def __str__(self) -> str:
        hit = zip(self.signals, self.victims, strict=True)
        named = " and ".join(f"{kind.name} of stage {stage} rank {rank}" for kind, (stage, rank) in hit)
        parts = f"verdict {self.verdict:.2f} s, re-formation {self.formation:.2f}, re-initiation {self.initiation:.2f}"
        return f"{named}: {parts}"


def make_model(folder: Path, heads: int = 6, layers: int = 4, vocab: int = VOCAB, **more: Any) -> Path:
    return make_gpt2(folder, heads=heads, layers=layers, hidden=heads * 6, vocab=vocab, positions=96, seed=7, **more)


class Rounds:
    """Runs rounds on one stack, and asserts what each must show."""

    def __init__(
        self,
        stack: Running,
        model: Path,
        draw: random.Random,
        of: type[Reference] = Reference,
        of_stack: bool = False,
        forms: Sequence[Mapping[str, str]] = ({},),
    ) -> None:
        """of_stack: the tokens must be those of the stack itself, not of the reference. forms: of the requests, in
        turn."""
        self._stack, self._draw, self._of_stack, self._forms = stack, draw, of_stack, forms
        self._reference = of(model)

    async def round(self, victims: Mapping[int, signal.Signals]) -> Recovery:
        """Runs one round, which sends a signal to each of these ranks (by number in the engine) at once."""
        stack, before, at = self._stack, self.ranks(), 0

        def hit() -> None:
            nonlocal at
            at = time.time_ns()
            for rank, kind in victims.items():
                os.kill(before[rank]["pid"], kind)

        await self.load(hit)
        await stack.until(lambda: self.ranks().keys() == before.keys())
        await stack.until(lambda: formed_after(stack.journal(), at))
        after = self.ranks()
        survivors = before.keys() - victims.keys()
        assert {r: after[r]["pid"] for r in survivors} == {r: before[r]["pid"] for r in survivors}, (
            "the other ranks keep their processes"
        )
        assert all(after[r]["pid"] != before[r]["pid"] for r in victims)
        places = tuple((before[r]["stage"], before[r]["tensor_rank"]) for r in victims)
        return recovery(stack.journal(), at, places, tuple(victims.values()))

    async def load(self, disturb: Callable[[], None]) -> None:
        """Streams requests, calls `disturb` at a random moment, and compares the tokens with an undisturbed run's."""
        stack, draw = self._stack, self._draw
        asked = list(islice(self._reference.random(draw, (1, 20), (NEW_TOKENS, NEW_TOKENS)), REQUESTS))
        prompts, wanted = [prompt for prompt, _ in asked], [tokens for _, tokens in asked]
        ways = [{**form, "ignore_eos": not form} for _, form in zip(prompts, cycle(self._forms), strict=False)]
        if self._of_stack:
            wanted = [await stack.tokens(prompt, NEW_TOKENS, **way) for prompt, way in zip(prompts, ways, strict=True)]
        seen: list[int] = []
        moment = draw.randint(1, REQUESTS * NEW_TOKENS // 3)
        streams = [
            asyncio.create_task(stack.tokens(prompt, NEW_TOKENS, seen.append, priority=draw.choice(CLASSES), **way))
            for prompt, way in zip(prompts, ways, strict=True)
        ]
        await stack.until(lambda: len(seen) >= moment or all(task.done() for task in streams))
        disturb()
        got = await asyncio.wait_for(asyncio.gather(*streams), 120)
        assert got == wanted, "the tokens of an undisturbed run"

    def ranks(self) -> dict[int, dict[str, Any]]:
        return {p["rank"]: p for p in self._stack.processes() if p["role"] == "rank"}


def formed_after(journal: list[Line], at: int) -> bool:
    return any("formed" in note and note["wall"] > at for note in notes(journal))


def notes(journal: list[Line]) -> list[dict[str, Any]]:
    return [line.values for line in journal if isinstance(line, Note)]


def recovery(
    journal: list[Line], at: int, places: tuple[tuple[int, int], ...], kinds: tuple[signal.Signals, ...]
) -> Recovery:
    """The recovery that began at `at` (ns). Asserts that the verdicts name these ranks and no others."""
    later = [note for note in notes(journal) if note.get("wall", 0) > at]
    lost = [note for note in later if "lost" in note]
    formed = next(note for note in later if "formed" in note)
    sentence = "; ".join(note["lost"] for note in lost)
    for stage, rank in places:
        assert f"stage {stage} rank {rank} of engine-0 at " in sentence, sentence
    assert sentence.count(" of engine-0 at ") == len(places), sentence
    assert all(part in sentence for part in ("(host ", "last iteration ")), sentence
    tokens = (max(t[6] for t in note["times"]) for note in notes(journal) if "times" in note)
    first = next(
        (sent for sent in tokens if sent > formed["wall"]), formed["wall"]
    )  # the default: nothing was left to do
    stamps = at, lost[0]["wall"], formed["wall"], first
    verdict, formation, initiation = ((b - a) / 1e9 for a, b in pairwise(stamps))
    return Recovery(places, kinds, sentence, verdict, formation, initiation)


def check_journals(run_dir: Path) -> None:
    """Each journal replays to the same actions of core and lifecycle, and no slot is reserved after its last event."""
    journals = sorted(run_dir.glob("journal-*.jsonl"))
    assert journals
    for path in journals:
        heading, *lines = read(path)
        assert isinstance(heading, Heading)
        core, lifecycle = restored(heading)
        for line in lines:
            match line:
                case CoreStep(event, actions):
                    assert actions == tuple(core.step(event)), f"{path.name}: {event}"
                case LifeStep(event, actions):
                    assert actions == tuple(lifecycle.step(event)), f"{path.name}: {event}"
                case _:
                    pass
        assert core.memory.reserved == 0, f"{path.name}: slots are reserved at the end"


async def main(
    rounds: int, seed: int, tp: int, pp: int, run_ahead: int, dtype: str, kernels: str, family: str, device: str,
    graphs_tp: bool, policy: str, slots: int | None, forms: bool, kv_dtype: str | None,
) -> None:  # fmt: skip
    draw = random.Random(seed)
    done: list[Recovery] = []
    with tempfile.TemporaryDirectory(prefix="orca-kill-rounds-") as temporary:
        folder = Path(temporary)
        model, of, run = folder / "model", Reference, folder / "run"
        if family == "t5":
            make_t5(model, seed=7, tied=False, num_heads=6, num_layers=3, vocab_size=VOCAB)
            of = Seq2Seq
        elif family == "llama":
            make_shape(model, "llama, 2 K/V heads", num_hidden_layers=4, max_position_embeddings=96)
        elif forms:
            make_model(model, vocab=259, tokenizer=True, special=["</s>"], eos_token_id=256)
        else:
            make_model(model)
        numbers: dict[str, Any] = {"tp": tp, "pp": pp, "max_batch_size": MAX_BS, "run_ahead": run_ahead}
        numbers |= {"cuda_graphs_tp": graphs_tp, "policy": policy, "slots": slots}
        numbers |= {"dtype": dtype, "kv_dtype": kv_dtype, "kernels": kernels, "device": device}
        of_stack = forms or dtype != "float32" or kv_dtype is not None
        async with running(run, model, **numbers) as stack:
            lab = Rounds(stack, model, draw, of, of_stack, FORMS if forms else ({},))
            for n in range(rounds):
                # Each rank in turn, with SIGKILL and with SIGSTOP; every eighth round hits another rank too.
                ranks = tp * pp
                victims = {n % ranks: SIGNALS[n // ranks % 2]}
                if n % 8 == 7 and ranks > 1:
                    victims[(n + draw.randrange(1, ranks)) % ranks] = draw.choice(SIGNALS)
                done.append(await lab.round(victims))
                print(f"round {n + 1}: {done[-1]}", flush=True)
            batches = list(scheduled(stack.journal()))
            preempted = sum(len(batch.preempted) for batch in batches)
            drafts = sum(member.drafts for batch in batches for member in batch.members)
        check_journals(run)
    for kind in SIGNALS:
        of_kind = [r for r in done if r.signals == (kind,)]
        if of_kind:
            columns = ([getattr(r, part) for r in of_kind] for part in ("verdict", "formation", "initiation"))
            verdict, formation, initiation = (
                f"{statistics.median(column):.2f} s (most {max(column):.2f})" for column in columns
            )
            print(f"{kind.name} of one rank, {len(of_kind)} rounds, medians:", end=" ")
            print(f"verdict {verdict}, re-formation {formation}, re-initiation {initiation}")
    print(f"slots given up {preempted} times, {drafts} drafts")
    print(f"{rounds} rounds passed: tokens equal, survivors' pids unchanged, slots reserved 0, journals replay")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--run-ahead", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--kernels", default="auto", help="those of a rank; device-loop: the loop of a GPU")
    parser.add_argument("--family", choices=("gpt2", "llama", "t5"), default="gpt2")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--graphs-tp", action="store_true", help="graphs have the all-reduces of tensor ranks, too")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--forms", action="store_true", help="two of three requests ask for a form")
    parser.add_argument("--kv-dtype", choices=("int8",), help="of keys and values; the default: --dtype")
    parser.add_argument("--slots", type=int, help="few, so that requests give theirs up")
    given = parser.parse_args()
    numbers = given.rounds, given.seed, given.tp, given.pp, given.run_ahead
    kind = given.dtype, given.kernels, given.family, given.device, given.graphs_tp
    asyncio.run(main(*numbers, *kind, given.policy, given.slots, given.forms, given.kv_dtype))
