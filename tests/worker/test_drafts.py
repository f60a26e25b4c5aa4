"""Drafts: tokens that are guessed, and computed together with what follows them. The stream is the one without them."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from checkpoints import make_gpt2, make_shape
from worker.driver import Sampled, TinyEngine, make_stage
from worker.engines import in_process

SLOTS = 1600


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gpt2(tmp_path_factory.mktemp("m"), heads=4, layers=2, hidden=32, vocab=211, positions=96, seed=3)


def requests() -> list[Sampled]:
    """Greedy, drawn, cut by top-k and top-p, adjusted, with logprobs and scored prompts."""
    adjusted = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "top_logprobs": 2, "prompt_logprobs": True}
    ways = [{}, {"temperature": 0.9}, {"temperature": 0.8, "top_k": 20}, {"temperature": 1.1, "top_p": 0.8}, adjusted]
    return [
        Sampled([(5 + n * k) % 211 for k in range(1 + 4 * n)], 12, {"seed": n, "logprobs": n % 2 == 0} | ways[n % 5])
        for n in range(10)
    ]


def guesses(known: Sequence[Sampled], chance: random.Random) -> Callable[[Sampled], list[int]]:
    """Drafts of which each is right with a probability of two thirds, up to five; of a third of the requests none."""
    streams = {tuple(one.prompt): one.made for one in known}

    def guess(request: Sampled) -> list[int]:
        rest = streams[tuple(request.prompt)][len(request.made) :]
        return [
            token if chance.random() < 0.67 else (token + 1) % 211
            for token in rest[: chance.choice((0, chance.randint(1, 5), 5))]
        ]

    return guess


def same(mine: list[Sampled], theirs: list[Sampled], logprobs: bool = True) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert (one.made, one.scored_prompt) == (other.made, other.scored_prompt)
        assert len(one.logprobs) == len(one.made)
        if logprobs:
            assert repr(one.logprobs) == repr(other.logprobs)
            assert one.tops == other.tops


@pytest.mark.parametrize("kernels", ["auto", "torch", "device-loop"])
@pytest.mark.parametrize("seed", range(3))
def test_the_stream_is_the_one_without_drafts(folder: Path, kernels: str, seed: int) -> None:
    """The compiled kernels make the same bits; the others round another batch otherwise."""
    plain, mine = requests(), requests()
    slow = TinyEngine(make_stage(folder, SLOTS, 4, kernels=kernels), SLOTS, 4, seed)
    slow.run(plain)
    fast = TinyEngine(
        make_stage(folder, SLOTS, 4, kernels=kernels), SLOTS, 4, seed, guesses(plain, random.Random(seed))
    )
    fast.run(mine)
    if kernels == "auto":
        same(mine, plain)
    else:
        assert [one.made for one in mine] == [one.made for one in plain]
    assert fast.number < 0.8 * slow.number


@pytest.mark.parametrize(
    "shape", ["mistral, a window", "qwen3, windows of some layers", "gemma3, windows but in one layer"]
)
def test_windows(tmp_path: Path, shape: str) -> None:
    folder = make_shape(tmp_path, shape)
    plain, mine = requests(), requests()
    TinyEngine(make_stage(folder, SLOTS, 4), SLOTS, 4).run(plain)
    TinyEngine(make_stage(folder, SLOTS, 4), SLOTS, 4, 0, guesses(plain, random.Random(1))).run(mine)
    same(mine, plain)


@pytest.mark.parametrize("kernels", ["auto", "torch", "device-loop"])
def test_a_prefix_lm(tmp_path: Path, kernels: str) -> None:
    folder = make_gpt2(tmp_path, heads=4, layers=2, hidden=32, vocab=211, positions=96, seed=3, orca_prefix_lm=True)
    plain, mine = requests(), requests()
    TinyEngine(make_stage(folder, SLOTS, 4, kernels=kernels), SLOTS, 4).run(plain)
    TinyEngine(make_stage(folder, SLOTS, 4, kernels=kernels), SLOTS, 4, 0, guesses(plain, random.Random(1))).run(mine)
    assert [one.made for one in mine] == [one.made for one in plain]


@pytest.mark.parametrize(
    ("tp", "pp", "silent"), [(1, 1, True), (2, 1, False), (1, 2, True), (2, 2, False), (2, 2, True)]
)
async def test_engines_of_several_ranks(folder: Path, tp: int, pp: int, silent: bool) -> None:
    """silent: the ranks remember the tokens themselves, and the first stage learns them on the data plane."""
    plain = requests()
    async with in_process(folder, tp, pp, slots=SLOTS) as (master, _):
        await master.run(plain)
    mine = requests()
    async with in_process(folder, tp, pp, slots=SLOTS, return_tokens=silent) as (master, _):
        master.guess, master.silent = guesses(plain, random.Random(2)), silent
        await master.run(mine)
    same(mine, plain)
