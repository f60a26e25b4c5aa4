"""Float32 tokens of whole stacks equal transformers': greedy ones, and Marian's as they are drawn from its logits.

All run the default policy but for those that name another one. GPT-2 for tp x pp in {1, 2, 3} x {1, 2, 4}, run-ahead 0
and 1, a fifth of them as the paper has it; the other families for {1, 2} x {1, 2}, max_bs 1, 3, 8, and those with an
encoder for three stages and a run-ahead too. The loop of a GPU on a CPU (`kernels=device-loop`) for all families
without an encoder, {1, 2} x {1, 2}, run-ahead 0 and 1; where it runs ahead, the graphs have the all-reduces of two
tensor ranks. Prompts in parts of 4 to 256 positions for all families that can; blocks on demand with few slots,
drafts, and requests that begin behind others' blocks, for all families without an encoder.

    python tests/e2e/token_grid.py [--sample N] [--seed 1] [--model t5] [--kernels device-loop]
                                   [--device cuda --ranks 4] [--graphs-tp]

The models are the demo model and random ones, whose sizes no number of ranks divides. Requests arrive at random.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1])]

from checkpoints import make_gpt2, make_shape  # noqa: E402
from encoder_decoders import Drawn, Seq2Seq, make_marian, make_t5  # noqa: E402
from reference import Known, PrefixLM, Reference  # noqa: E402
from stacks import Running, running  # noqa: E402

from orca_local.stack import DEMO_MODEL  # noqa: E402

MODELS = ("demo", "odd")
SHAPES = {  # of checkpoints.py
    "llama": "llama, tied, biases, 1 K/V head, large heads",
    "llama-10-heads": "llama, 10 heads",
    "mistral": "mistral, a window",
    "qwen2": "qwen2, a window in the upper layer",
    "qwen3": "qwen3, windows of some layers",
    "gemma3": "gemma3, windows but in one layer",
    "neox": "neox",
    "gptj": "gptj",
}
WITH_ENCODER = {  # more layers in the decoder, and more in the encoder
    "t5": partial(
        make_t5, seed=3, tied=False, num_heads=6, num_layers=3, num_decoder_layers=4, feed_forward_proj="gated-gelu"
    ),
    "marian": partial(
        make_marian, seed=3, encoder_layers=5, decoder_layers=3, encoder_attention_heads=6, decoder_attention_heads=6
    ),
}
PREFIX_LM = {"prefix-lm": "qwen3, large heads"}  # SHAPES whose prompts see themselves
USUAL = ("auto", "paper")  # the default policy, and the paper's
ONE_RANK = ("llama-10-heads", "mistral")  # 5 and 3 K/V heads: no two ranks share them


class Case(NamedTuple):
    model: str
    tp: int
    pp: int
    run_ahead: int = 0
    max_bs: int = 3
    kernels: str = "auto"
    policy: str = "auto"
    block_size: int = 4
    slots: int | None = None

    @property
    def graphs_tp(self) -> bool:
        return self.kernels == "device-loop" and self.tp > 1 and self.run_ahead > 0

    @property
    def requests(self) -> int:
        return 60 if self.policy not in USUAL else 16 if self.max_bs < 8 else 40


class Asked(NamedTuple):
    """A request, the second at which it is sent, and how its tokens are drawn."""

    known: Known
    at: float
    sampling: dict[str, Any]


GRID = [
    *(
        Case(*case, policy="auto" if n % 5 else "paper")
        for n, case in enumerate(product(MODELS, (1, 2, 3), (1, 2, 4), (0, 1)))
    ),
    *(
        Case(model, tp, pp, max_bs=max_bs)
        for model, tp, pp, max_bs in product((*SHAPES, *PREFIX_LM, *WITH_ENCODER), (1, 2), (1, 2), (1, 3, 8))
        if tp == 1 or model not in ONE_RANK
    ),
    *(Case(model, 1, 3, ahead, max_bs) for model, ahead, max_bs in product(WITH_ENCODER, (0, 1), (1, 3, 8))),
    *(Case(model, 2, 2, run_ahead=1) for model in WITH_ENCODER),
    *(
        Case(model, tp, pp, n % 2, policy=f"{fill},positions={positions}", block_size=(16, 1)[n % 2])
        for n, (model, tp, pp, (fill, positions)) in enumerate(
            product(
                (*MODELS, *SHAPES),
                (1, 2),
                (1, 2),
                (("stall-free", 4), ("split-fuse", 17), ("stall-free", 64), ("stall-free", 256), ("split-fuse", 5)),
            )
        )
        if tp == 1 or model not in ONE_RANK
    ),
    *(
        Case(model, tp, pp, max_bs=8, policy=policy, slots=300)
        for model, (tp, pp), policy in product(
            (*MODELS, *SHAPES, *PREFIX_LM),
            ((1, 1), (2, 2), (1, 2)),
            ("even,kv=on-demand", "drafts=ngram", "balanced,positions=32,drafts=ngram"),
        )
        if (tp == 1 or model not in ONE_RANK) and ("balanced" not in policy or model not in PREFIX_LM)
    ),
    *(
        Case(
            model,
            tp,
            pp,
            n % 2 if "drafts" not in policy else 0,
            8,
            policy=policy,
            block_size=(4, 16, 1)[n % 3],
            slots=320,
        )
        for n, (model, (tp, pp), policy) in enumerate(
            product(
                (*MODELS, *SHAPES),
                ((1, 1), (2, 2), (1, 2), (2, 1)),
                ("prefix=tenant", "balanced,positions=32,prefix=tenant", "kv=on-demand,prefix=shared,drafts=ngram"),
            )
        )
        if tp == 1 or model not in ONE_RANK
    ),
    *(Case(model, 1, 2, policy="even") for model in WITH_ENCODER),
    *(
        Case(model, tp, pp, ahead, kernels="device-loop")
        for model, tp, pp, ahead in product((*MODELS, *SHAPES, *PREFIX_LM), (1, 2), (1, 2), (0, 1))
        if tp == 1 or model not in ONE_RANK
    ),
]


def make_odd(folder: Path) -> Path:
    """6 heads of 7, 5 layers, an inner size of 50, a vocabulary of 211."""
    return make_gpt2(folder, heads=6, layers=5, hidden=42, vocab=211, positions=96, seed=3, n_inner=50)


def requests_for(reference: Reference, draw: random.Random, count: int, alike: bool) -> list[Asked]:
    """Random requests at random moments. alike: prompts begin as earlier ones did and went on."""
    moments = accumulate(draw.expovariate(1 / 0.02) for _ in range(count))
    known = going_on(reference, draw) if alike else reference.random(draw, (1, 40), (1, 24))
    return [Asked(one, at, reference.sampling(one.prompt)) for at, one in zip(moments, known, strict=False)]


def going_on(reference: Reference, draw: random.Random) -> Iterator[Known]:
    texts = list[list[int]]()
    for fresh in reference.random(draw, (1, 20), (1, 24)):
        old = draw.choice([[], *texts[-8:]])
        prompt = [*old[: draw.randint(0, len(old))], *fresh.prompt][:40]
        known = Known(prompt, reference.greedy(prompt, len(fresh.tokens)))
        texts.append([*prompt, *known.tokens])
        yield known


async def check(case: Case, folder: Path, seed: int, device: str = "cpu", graphs_tp: bool = False) -> None:
    """Runs one case on a stack of its own. Raises AssertionError when a token differs."""
    draw, of = random.Random(f"{seed} {case}"), Reference
    if case.model in WITH_ENCODER:
        model, of = WITH_ENCODER[case.model](folder / "model"), Drawn if case.model == "marian" else Seq2Seq
    elif case.model in PREFIX_LM:
        model, of = make_shape(folder / "model", PREFIX_LM[case.model], orca_prefix_lm=True), PrefixLM
    elif case.model in SHAPES:
        model = make_shape(folder / "model", SHAPES[case.model])
    else:
        model = make_odd(folder / "model") if case.model == "odd" else DEMO_MODEL
    asked = requests_for(of(model), draw, case.requests, alike="prefix" in case.policy)
    run = folder / "run"
    numbers: dict[str, Any] = {"max_batch_size": case.max_bs, "block_size": case.block_size}
    numbers |= {"run_ahead": case.run_ahead, "policy": case.policy, "slots": case.slots}
    numbers["cuda_graphs_tp"] = case.graphs_tp or graphs_tp
    async with running(run, model, tp=case.tp, pp=case.pp, **numbers, kernels=case.kernels, device=device) as stack:
        assert len([p for p in stack.processes() if p["role"] == "rank"]) == case.tp * case.pp
        got = await asyncio.gather(*(answer(stack, request) for request in asked))
    assert got == [request.known.tokens for request in asked]


async def answer(stack: Running, request: Asked) -> list[int]:
    """Sends a request at its moment. Returns its tokens."""
    await asyncio.sleep(request.at)
    return await stack.tokens(request.known.prompt, len(request.known.tokens), **request.sampling)


async def main(
    sample: int | None, seed: int, model: str | None, kernels: str | None, device: str, ranks: int | None,
    graphs_tp: bool, policies: bool,
) -> None:  # fmt: skip
    grid = [case for case in GRID if model in (None, case.model) and kernels in (None, case.kernels)]
    if policies:
        grid = [case for case in grid if case.policy not in USUAL]
    if ranks is not None:
        grid = [case for case in grid if case.tp * case.pp <= ranks]
    cases = grid if sample is None else random.Random(seed).sample(grid, sample)
    for case in cases:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="orca-grid-") as folder:
            await check(case, Path(folder), seed, device, graphs_tp)
        ahead = ", one ahead" if case.run_ahead else ""
        loop = f", {case.kernels}" if case.kernels != "auto" else ""
        where = f"tp {case.tp} x pp {case.pp}, max_bs {case.max_bs}{ahead}{loop}"
        where += f", {case.policy}, blocks of {case.block_size}" if case.policy != "auto" else ""
        print(f"{case.model} model, {where}: {case.requests} requests equal", end=" ")
        print(f"({time.monotonic() - started:.1f} s)", flush=True)
    print(f"{len(cases)} of {len(grid)} passed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, help="how many cases to run, chosen by the seed; all if not given")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", help="the cases of one model alone")
    parser.add_argument("--kernels", choices=("auto", "device-loop"), help="the cases of these kernels alone")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, help="the cases of this number of ranks at most")
    parser.add_argument("--graphs-tp", action="store_true", help="graphs have the all-reduces of tensor ranks, too")
    parser.add_argument("--policies", action="store_true", help="the cases of other policies than the paper's alone")
    given = parser.parse_args()
    chosen = given.sample, given.seed, given.model, given.kernels, given.device, given.ranks, given.graphs_tp
    asyncio.run(main(*chosen, given.policies))
