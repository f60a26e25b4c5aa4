"""Models with an encoder: the tokens of transformers in any batch, from a request's input + max_new_tokens slots."""

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from encoder_decoders import Seq2Seq, change, make_marian, make_t5
from properties import PART, covering, first
from torch import Tensor
from worker.borders import tokens_near
from worker.company import check_any_company, ways
from worker.driver import Sampled, TinyEngine, make_stage
from worker.engines import Master, fork_server, processes
from worker.logits import seen_by

from orca_common.checkpoint import read_checkpoint
from orca_common.errors import FailedPrecondition
from orca_kernels.cpu.library import instruction_sets
from orca_worker.iteration.batch import Batch
from orca_worker.models import cpu, parts, plain
from orca_worker.models.families import topology
from orca_worker.partition import Types
from orca_worker.processes.forks import ForkServer
from orca_worker.settings import Kernels

VOCABULARY, SLOTS = 97, 900
ALL_KERNELS = ["torch", *instruction_sets()]

T5_SHAPES: list[dict[str, Any]] = [
    {"num_heads": 3, "num_layers": 2, "num_decoder_layers": 3},
    {"num_heads": 5, "num_layers": 3, "num_decoder_layers": 1, "feed_forward_proj": "gated-gelu", "tied": False},
    {"num_heads": 1, "d_kv": 20, "feed_forward_proj": "gated-silu"},
    {"num_heads": 4, "d_kv": 64, "d_model": 40, "num_layers": 1, "d_ff": 33, "tied": False},
]
MARIAN_SHAPES: list[dict[str, Any]] = [
    {"decoder_layers": 3},
    {
        "d_model": 40,
        "encoder_layers": 3,
        "decoder_layers": 1,
        "encoder_attention_heads": 5,
        "decoder_attention_heads": 5,
        "scale_embedding": True,
        "activation_function": "swish",
        "never": [[96], [5]],
    },
]


def prompts_of(seed: int, count: int) -> list[list[int]]:
    chance = random.Random(seed)
    lengths = [1, 2, 15, 16, 33, 40, *(chance.randint(1, 40) for _ in range(count))]
    return [[chance.randrange(VOCABULARY) for _ in range(length)] for length in lengths[:count]]


def check_against_transformers(folder: Path, temperature: float, place: int) -> None:
    """Greedy tokens and drawn ones: the greedy streams of random weights may repeat one token. `make test` has every
    other kind of kernels for a shape, by its place among all, and `make fuzz` all of them."""
    reference, prompts, all_logits = Seq2Seq(folder), prompts_of(2, 10), dict[tuple[int, ...], np.ndarray]()
    known = list(reference.known((prompt, 3 + n) for n, prompt in enumerate(prompts)))
    assert len(known) > 7
    ways = list(zip(ALL_KERNELS, (4, 1, 16, 5, 3, 2), strict=False))
    for kernels, block_size in ways if PART == 1 else ways[place % 2 :: 2]:
        engine = TinyEngine(make_stage(folder, SLOTS, block_size, kernels=kernels), SLOTS, block_size, seed=3)
        likeliest = [Sampled(prompt, len(tokens)) for prompt, tokens in known]
        drawn = [Sampled(prompt, 9, {"temperature": temperature, "seed": n}) for n, prompt in enumerate(prompts)]
        engine.run(likeliest + drawn)
        assert engine.mixed
        assert [request.made for request in likeliest] == [tokens for _, tokens in known], kernels
        assert len({token for request in drawn for token in request.made}) > 30, (
            "a model that says one thing tests none"
        )
        for n, request in enumerate(drawn):
            key = n, *request.made  # most kernels draw the same
            if key not in all_logits:
                all_logits[key] = reference.logits(request.prompt, request.made[:-1]).double().numpy()
            logits = all_logits[key]
            for i, token in enumerate(request.made):
                assert token in tokens_near(logits[i], seed=n, index=i, temperature=temperature), (kernels, n, i)


@pytest.mark.parametrize("shape", T5_SHAPES, ids=str)
def test_t5_makes_the_tokens_of_transformers(tmp_path: Path, shape: dict[str, Any]) -> None:
    folder = make_t5(tmp_path, seed=1, **shape)
    check_against_transformers(folder, 0.5 if shape.get("tied", True) else 5.0, T5_SHAPES.index(shape))


@pytest.mark.parametrize("shape", MARIAN_SHAPES, ids=str)
def test_marian_makes_the_tokens_of_transformers(tmp_path: Path, shape: dict[str, Any]) -> None:
    check_against_transformers(make_marian(tmp_path, seed=1, **shape), 3.0, MARIAN_SHAPES.index(shape))


def test_a_token_that_is_never_made(tmp_path: Path) -> None:
    """Published Marians forbid their padding so. Here it is the likeliest token."""
    free = make_marian(tmp_path / "free", seed=1)
    (prompt,) = prompts_of(2, 1)
    (wanted,) = Seq2Seq(free).greedy(prompt, 1)
    folder = make_marian(tmp_path / "never", seed=1, never=[[wanted], [96]])
    for kernels in ALL_KERNELS:
        request = Sampled(prompt, 5)
        TinyEngine(make_stage(folder, SLOTS, 4, kernels=kernels), SLOTS, 4).run([request])
        assert wanted not in request.made
        assert request.made == Seq2Seq(folder).greedy(prompt, 5)


def test_longer_than_the_reach_of_the_bias(tmp_path: Path) -> None:
    """Distances within, at and beyond the last bucket, from tiles of keys on both sides."""
    folder = make_t5(tmp_path, seed=5, relative_attention_max_distance=9)
    prompt = prompts_of(6, 1)[0] * 150
    reference = Seq2Seq(folder).known([(prompt, 80), (prompt[:77], 80)])
    for prompt, tokens in reference:
        for kernels in ALL_KERNELS:
            engine = TinyEngine(make_stage(folder, SLOTS, 16, kernels=kernels), SLOTS, 16)
            request = Sampled(prompt, len(tokens))
            engine.run([request])
            assert request.made == tokens


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_papers_three_unbatchable_cases_in_one_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    """Section 3.2: initiations of different lengths, an initiation with an increment, increments at different indexes.

    The encoder's rows are one flat batch, and the decoder's another.
    """
    folder = make_t5(tmp_path, seed=1)
    engine = TinyEngine(make_stage(folder, SLOTS, 4, kernels=kernels), SLOTS, 4)
    x1, x2, x3, x4 = (Sampled(prompt, 9) for prompt in prompts_of(7, 4)[::-1])
    seen: list[tuple[Batch, Batch]] = []

    def look(*given: Any) -> tuple[Batch, Batch]:
        seen.append(parts.parts(*given))
        return seen[-1]

    monkeypatch.setattr(cpu if kernels == "auto" else plain, "parts", look)
    engine.step([x1], [])
    engine.step([x2], [x1])
    engine.step([x3, x4], [x1, x2])
    lengths = [len(x.prompt) for x in (x3, x4)]
    encoder, decoder = seen[-1]
    assert encoder.token_ids.tolist() == [*x3.prompt, *x4.prompt]
    assert encoder.positions.tolist() == [*range(lengths[0]), *range(lengths[1])]
    assert decoder.token_ids.tolist() == [0, 0, x1.made[1], x2.made[0]], "start tokens, and what was made"
    assert decoder.positions.tolist() == [0, 0, 2, 1]
    assert len({*encoder.slots.tolist(), *decoder.slots.tolist()}) == sum(lengths) + 4
    reference = Seq2Seq(folder)
    for x in (x1, x2, x3, x4):
        assert x.made == reference.greedy(x.prompt, len(x.made))


@pytest.mark.parametrize("family", ["t5", "marian"])
def test_bfloat16_is_as_near_as_that_of_transformers(tmp_path: Path, family: str) -> None:
    """Against float64 with the same rounded weights, over some shapes, by each instruction set of this machine."""
    ours, theirs = dict.fromkeys(instruction_sets(), 0.0), 0.0  # squares of all errors
    make, shapes = (make_t5, T5_SHAPES) if family == "t5" else (make_marian, MARIAN_SHAPES)
    for n, shape in enumerate(shapes):
        folder = make(tmp_path / str(n), seed=1, **shape)
        exact, other = (Seq2Seq(folder, dtype, torch.bfloat16) for dtype in (torch.float64, torch.bfloat16))
        right = {tuple(prompt): exact.logits(prompt, [])[0] for prompt in prompts_of(8, 8)}

        def squares(logits: Tensor, wanted: Tensor) -> float:
            return float((logits.double() - wanted)[wanted.isfinite()].square().sum())  # the others are never made

        theirs += sum(squares(other.logits(prompt, [])[0], right[tuple(prompt)]) for prompt in prompts_of(8, 8))
        for kernels in ours:
            requests = [Sampled(prompt, 1, {"logprobs": True}) for prompt in prompts_of(8, 8)]
            for tokens, seen in seen_by(make_stage(folder, 400, 16, "bfloat16", kernels), requests):
                ours[kernels] += squares(seen, right[tokens])
    assert all(0 < each <= theirs for each in ours.values()), (ours, theirs)


@pytest.mark.parametrize(("family", "way"), covering(("t5", "marian"), ways(), strength=1), ids=str)
def test_the_same_bits_in_any_company(tmp_path: Path, logits: list[Tensor], family: str, way: tuple[str, str]) -> None:
    """Also where a request begins again with what it has made, and where pieces cut the batch."""
    if family == "t5":
        folder = make_t5(tmp_path, seed=1, num_decoder_layers=3, d_kv=32, relative_attention_max_distance=9)
    else:
        folder = make_marian(tmp_path, seed=1)
    asked = [Sampled(prompt, 4, {"logprobs": True}) for prompt in prompts_of(3, 20)]
    check_any_company(folder, logits, *way, asked, ((16, 2, 512), (5, 1, 7)))


def test_a_recovery_in_plain_torch(tmp_path: Path) -> None:
    folder = make_t5(tmp_path, seed=1)
    engine = TinyEngine(make_stage(folder, SLOTS, 4, kernels="torch"), SLOTS, 4)
    prompt, reference = prompts_of(3, 5)[4], Seq2Seq(folder)
    request = Sampled(prompt, 12)
    engine.step([request], [])
    while len(request.made) < 12:
        if len(request.made) in (1, 6):
            engine.free(request)
            engine.step([request], [])
        else:
            engine.step([], [request])
    assert request.made == reference.greedy(prompt, 12)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def forks(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ForkServer]:
    """One for all tests."""
    async with fork_server(make_t5(tmp_path_factory.mktemp("forks") / "t5", seed=1)) as server:
        yield server


RANKS = [
    ("t5", 6, 1, 3, "auto"),
    ("marian", 10, 2, 2, "auto"),
    ("t5", 6, 2, 2, "torch"),
    ("t5", 10, 2, 1, "auto"),
    ("marian", 6, 2, 1, "auto"),
]


@pytest.mark.parametrize(("family", "heads", "tp", "pp", "kernels"), first(3, RANKS))
@pytest.mark.asyncio(loop_scope="module")
async def test_several_ranks_in_processes(
    tmp_path: Path, forks: ForkServer, family: str, heads: int, tp: int, pp: int, kernels: Kernels
) -> None:
    """With several stages the encoder's output returns to the first, while other iterations are in flight. In one case
    a stage has no layer of the encoder."""
    if family == "t5":
        shape: dict[str, Any] = {"num_heads": heads, "num_decoder_layers": 4, "feed_forward_proj": "gated-gelu"}
        folder = make_t5(tmp_path, seed=1, tied=False, **shape)
    else:
        shape = {"encoder_attention_heads": heads, "decoder_attention_heads": heads, "d_model": 4 * heads}
        folder = make_marian(tmp_path, seed=1, never=[[96], [5]], encoder_layers=3, **shape)
    known = list(Seq2Seq(folder).known((prompt, 3 + n) for n, prompt in enumerate(prompts_of(4, 8))))
    assert len(known) > 5
    async with processes(forks, [folder] * tp * pp, kernels=kernels) as ranks:
        master = Master([rank.address for rank in ranks], tp, pp, 600)
        try:
            await master.form()
            requests = [Sampled(prompt, len(tokens)) for prompt, tokens in known]
            await master.run(requests)
            assert [request.made for request in requests] == [tokens for _, tokens in known]
        finally:
            await master.close()


def test_a_part_of_a_prompt_is_refused() -> None:
    """No request can ask for it: only a policy that cuts prompts would."""
    requests = np.zeros(1, [("prompt", "i8")])
    requests["prompt"] = 5
    for start, count, out in ((0, 3, [0]), (3, 2, [0]), (0, 5, []), (5, 2, [0, 0])):
        batch = Batch(
            rows=np.array([0]),
            query_lengths=[count],
            contexts=[start],
            token_ids=np.arange(count),
            positions=np.arange(start, start + count),
            slots=np.arange(count),
            starts=np.array([0, count]),
            ends=np.array([start + count]),
            out_at=np.arange(count)[count - len(out) :],
            out_member=np.array(out),
            out_ends=np.arange(start + count)[start + count - len(out) :] + 1,
            requests=requests[out],
        )
        with pytest.raises(FailedPrecondition, match="a part of a prompt"):
            parts.parts(batch, None, 0)  # type: ignore[arg-type]


def test_a_slot_has_the_bytes_of_the_decoders_layers(tmp_path: Path) -> None:
    """Both the keys and values of the input and the decoder's own take the same in each of its layers."""
    t5 = make_t5(tmp_path / "t5", seed=1, num_heads=6, num_layers=4, num_decoder_layers=3)
    heads: dict[str, Any] = {"encoder_attention_heads": 6, "decoder_attention_heads": 6}
    marian = make_marian(tmp_path / "marian", seed=1, decoder_layers=5, **heads)
    for folder, layers, size in ((t5, 3, 8), (marian, 5, 4)):
        checkpoint = read_checkpoint(folder)
        (whole,) = topology(checkpoint, 1, 1, Types.of("float32"))
        halves = topology(checkpoint, 2, 1, Types.of("float32"))
        assert whole.slot_bytes == 2 * layers * 6 * size * 4
        assert [rank.slot_bytes for rank in halves] == [whole.slot_bytes // 2] * 2


REFUSED: list[tuple[str, dict[str, Any], int, int, str]] = [
    ("t5", {}, 1, 3, "pp 3: 2 layers are too few for 3 stages"),
    ("t5", {}, 2, 1, "tp 2: 3 heads cannot be shared evenly"),
    ("t5", {"feed_forward_proj": "gated-step"}, 1, 1, "asks for feed_forward_proj 'gated-step'"),
    ("t5", {"relative_attention_num_buckets": 7}, 1, 1, "has 7 buckets"),
    ("t5", {"decoder_start_token_id": 97}, 1, 1, "gives decoder_start_token_id 97"),
    ("marian", {"encoder_attention_heads": 1}, 1, 1, "has decoder_attention_heads 3 and encoder_attention_heads 1"),
    ("marian", {"d_model": 25}, 1, 1, "cuts a hidden size of 25 in 3 heads"),
    ("marian", {"decoder_vocab_size": 98}, 1, 1, "has vocabularies of 97 and 98 tokens"),
    ("marian", {"share_encoder_decoder_embeddings": False}, 1, 1, r"\(share_encoder_decoder_embeddings is false\)"),
    ("marian", {"tie_word_embeddings": False}, 1, 1, r"\(tie_word_embeddings is false\)"),
    ("marian", {"normalize_before": True}, 1, 1, "asks for norms before each part"),
    ("marian", {"bad_words_ids": [[3, 4]]}, 1, 1, "gives bad_words_ids"),
]


@pytest.mark.parametrize("family", ["t5", "marian"])
def test_the_repetition_penalty_is_of_the_decoders_tokens(tmp_path: Path, family: str) -> None:
    """Of the one before the answer, too: those that transformers' `generate` (5.23) gives its processor."""
    folder = (make_t5 if family == "t5" else make_marian)(tmp_path, seed=3)
    reference: Any = Seq2Seq(folder)
    chance = random.Random(3)
    prompts = [[chance.randrange(95) for _ in range(length)] for length in (1, 7, 20, 12)]
    requests = [Sampled(prompt, 6, {"repetition_penalty": 1.5}) for prompt in prompts]
    TinyEngine(make_stage(folder, 576, 5), 576, 5).run(requests)
    for request in requests:
        more = {"do_sample": False, "max_new_tokens": 6, "forced_eos_token_id": None, "repetition_penalty": 1.5}
        ids = reference._model.generate(torch.tensor([request.prompt]), **more)
        assert request.made == ids[0, 1:].tolist()
    assert any(request.made != reference.greedy(request.prompt, 6) for request in requests)


@pytest.mark.parametrize(("family", "fields", "tp", "pp", "sentence"), REFUSED, ids=str)
def test_refused_with_a_sentence(
    tmp_path: Path, family: str, fields: dict[str, Any], tp: int, pp: int, sentence: str
) -> None:
    folder = (make_t5 if family == "t5" else make_marian)(tmp_path, seed=1)
    change(folder, **fields)
    (folder / "generation_config.json").unlink()  # which goes before config.json
    with pytest.raises(FailedPrecondition, match=sentence):
        topology(read_checkpoint(folder), tp, pp, Types.of("float32"))


def test_positions(tmp_path: Path) -> None:
    """T5's are those of its input and of its output together; it has distances alone, so more would run too."""
    folder = make_t5(tmp_path, seed=1)
    assert read_checkpoint(folder).max_positions == 1024
    change(folder, n_positions=100)
    assert read_checkpoint(folder).max_positions == 200
    assert read_checkpoint(make_marian(tmp_path / "marian", seed=1)).max_positions == 64
