"""Keys and values in eight bits: engines make the tokens of transformers, whose attention gets keys and values that are
rounded as docs/weights.md says.

The arithmetic is written here once more. The last bits of an engine's float32 are not those of transformers, which adds
in another order, so a number in the middle between two codes may become the one or the other: 17 of 604,416 of a
GPT-2, 3 of 679,968 of the other models. A token may be another one for that. So transformers takes the codes that an
engine has kept, after each was seen to be a right one, and then every token must be the likeliest, without a tolerance.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import make_gpt2, make_shape
from encoder_decoders import make_t5
from properties import covering
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface
from transformers.models.gptj.modeling_gptj import GPTJAttention
from worker.company import check_any_company
from worker.driver import Sampled, TinyEngine, make_stage
from worker.engines import Master, in_process
from worker.test_handing import Pair, served
from worker.test_tags import Engine

from orca.v1 import worker_pb2
from orca_common.checkpoint import read_checkpoint
from orca_common.errors import FailedPrecondition
from orca_kernels.cpu.library import instruction_sets
from orca_scheduler.core.core import Action, ScheduleBatch
from orca_worker.iteration.model import Compute
from orca_worker.models.dtype import choose_types
from orca_worker.models.families import topology
from orca_worker.partition import Types
from orca_worker.stage.stage import Stage

VOCABULARY = 211
SLOTS = 40 * 48  # of 40 requests at once
BORDER = 0.01  # of a code: the last bits of float32 move a number by 0.002 at most here
SCALE = 1e-4  # of a scale: by 0.00004
MOST = 1e-4  # log-probabilities: more than the last bits of float32 change, and less than codes in the place of floats
BETWEEN_TWO = 0.02  # logits, where the codes of an engine are gone: less than one code of one key changes
DECODERS = (
    "gpt2",
    "llama, 2 K/V heads",
    "llama, tied, biases, 1 K/V head, large heads",
    "mistral, a window",
    "qwen2, a window in the upper layer",
    "qwen3, large heads",
    "gemma3, windows but in one layer",
    "neox",
    "gptj",
)


class Kept(NamedTuple):
    """Keys or values of one request, as an engine has kept them."""

    codes: Tensor  # [layers, heads, tokens, D] int8
    scales: Tensor  # [layers, heads, tokens, 1] float32

    @classmethod
    def of(cls, memory: Tensor, blocks: Sequence[int], size: int, tokens: int) -> "Kept":
        """Those of a rank with memory [layers, n_blocks, heads, bytes] int8 in blocks of `size` tokens."""
        head = memory[:, list(blocks)].transpose(1, 2)  # [layers, heads, blocks, bytes]
        codes, scales = head[..., : -4 * size], head[..., -4 * size :].contiguous().view(torch.float32)
        return cls(codes.unflatten(3, (size, -1)).flatten(2, 3)[:, :, :tokens], scales.flatten(2)[:, :, :tokens, None])

    @classmethod
    def joined(cls, parts: Sequence["Kept"], axis: int) -> "Kept":
        """axis: 0 where the parts are of pipeline stages, 1 of tensor ranks."""
        return cls(*(torch.cat(each, axis) for each in zip(*parts, strict=True)))


def kept_by(stages: Sequence[Stage], tp: int, blocks: Sequence[int], tokens: int) -> tuple[Kept, Kept]:
    """The keys and the values of a request's first tokens on the ranks of an engine, stage-major."""

    def of(memories: Sequence[Tensor], size: int) -> Kept:
        ranks = [Kept.of(memory, blocks, size, tokens) for memory in memories]
        return Kept.joined([Kept.joined(ranks[n : n + tp], 1) for n in range(0, len(ranks), tp)], 0)

    kvs = [stage._kv for stage in stages]
    return of([kv.keys for kv in kvs], kvs[0].block_size), of([kv.values for kv in kvs], kvs[0].block_size)


def rounded(x: Tensor, kept: Kept | None, layer: int) -> Tensor:
    """x [1, heads, S, D] float32, as the numbers that its codes stand for. The codes are those of `kept`, and right."""
    largest = x.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest < 1e-30, torch.zeros(()), 127.0 / largest)
    scale = torch.where(largest < 1e-30, torch.zeros(()), largest / 127.0)
    if kept is None:
        return torch.round(x * inverse) * scale  # half to even
    codes, scales = (each[layer][None] for each in kept)
    assert codes.shape == x.shape
    assert (x * inverse - codes).abs().max() < 0.5 + BORDER
    assert ((scales - scale).abs() <= SCALE * scale).all()
    return codes * scales


class Oracle:
    """A checkpoint in transformers, in float32."""

    def __init__(self, folder: Path) -> None:
        kind = AutoModelForSeq2SeqLM if read_checkpoint(folder).has_encoder else AutoModelForCausalLM
        self.model: Any = kind.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], made: Sequence[int], kept: tuple[Kept, Kept] | None = None) -> Tensor:
        """[made, V]: those of which each token was made. Attention gets rounded keys and values."""
        of_gptj: Any = GPTJAttention._attn
        keys, values = kept or (None, None)

        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *given: Any, **more: Any) -> Any:
            layer = module.layer_idx or 0
            key, value = rounded(key, keys, layer), rounded(value, values, layer)
            return sdpa_attention_forward(module, query, key, value, *given, **more)

        def attend_in_gptj(module: Any, query: Tensor, key: Tensor, value: Tensor, *given: Any, **more: Any) -> Any:
            layer, turned = module.layer_idx, module.rotary_dim
            # An engine has the first elements of GPT-J's pairs before the second ones; turned in the same way.
            order = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, key.shape[3])]
            back = torch.tensor(order).argsort()
            key = rounded(key[..., order], keys, layer)[..., back]
            return of_gptj(module, query, key, rounded(value, values, layer), *given, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(AttentionInterface._global_mapping, "sdpa", attend)
            patch.setattr(GPTJAttention, "_attn", attend_in_gptj)
            if not self.model.config.is_encoder_decoder:
                ids = torch.tensor([[*prompt, *made[:-1]]])
                return self.model(ids, use_cache=False).logits[0, len(prompt) - 1 :]
            ids = torch.tensor([[self.model.config.decoder_start_token_id, *made[:-1]]])
            return self.model(torch.tensor([list(prompt)]), decoder_input_ids=ids, use_cache=False).logits[0]

    def check(self, requests: Sequence[Sampled], kept: Mapping[int, tuple[Kept, Kept]]) -> None:
        """Each token is the likeliest behind those before it. kept: by a request's id."""
        apart = list[Tensor]()
        for request in requests:
            logits = self.logits(request.prompt, request.made, kept[id(request)])
            assert logits.argmax(1).tolist() == request.made
            if request.logprobs:
                apart.append((logits.log_softmax(1).max(1).values - torch.tensor(request.logprobs)).abs())
        assert not apart or torch.cat(apart).median() < MOST
        check_answers(requests)

    def check_without_codes(self, requests: Sequence[Sampled]) -> None:
        """Each token is nearly the likeliest, and most log-probabilities are right."""
        apart = list[Tensor]()
        for request in requests:
            logits = self.logits(request.prompt, request.made)
            of_made = logits.gather(1, torch.tensor(request.made)[:, None])[:, 0]
            assert (logits.max(1).values - of_made).max() < BETWEEN_TWO
            apart.append((of_made - logits.logsumexp(1) - torch.tensor(request.logprobs)).abs())
        assert torch.cat(apart).median() < MOST
        check_answers(requests)


def check_answers(requests: Sequence[Sampled]) -> None:
    assert {len(request.made) for request in requests} == {8}
    answers = {tuple(request.made) for request in requests}
    assert len(answers) > len(requests) // 3, "a model that answers all alike tests nothing"


def keeping(
    engine: TinyEngine | Master, held: Mapping[int, tuple[int, list[int]]], stages: Sequence[Stage], tp: int = 1
) -> dict[int, tuple[Kept, Kept]]:
    """Keys and values of requests that end from now on, by their ids. held: rows and blocks of those that run."""
    kept, free = dict[int, tuple[Kept, Kept]](), engine.free

    def keep(request: Sampled) -> None:
        tokens = len(request.prompt) + len(request.made) - 1
        kept[id(request)] = kept_by(stages, tp, held[id(request)][1], tokens)
        free(request)

    engine.free = keep
    return kept


def make(folder: Path, shape: str) -> Path:
    if shape == "gpt2":
        return make_gpt2(folder, heads=6, layers=2, hidden=192, vocab=VOCABULARY, positions=64, seed=4)
    if shape == "t5":
        return make_t5(folder, seed=1, tied=False, num_heads=4, d_kv=10, d_ff=70)
    # Tied, gemma3 says its last token again, whatever its attention does.
    return make_shape(folder, shape, **({"tie_word_embeddings": False} if "gemma3" in shape else {}))


def requests_for(count: int, seed: int, vocabulary: int = VOCABULARY) -> list[Sampled]:
    chance = random.Random(seed)
    lengths = [1, 40, *(chance.randint(2, 40) for _ in range(count))]
    prompts = [[chance.randrange(vocabulary - 1) for _ in range(n)] for n in lengths[:count]]
    return [Sampled(prompt, 8, {"logprobs": True}) for prompt in prompts]


@pytest.mark.parametrize("shape", [*DECODERS, "t5"])
def test_tokens_equal_an_independent_implementation(tmp_path: Path, shape: str) -> None:
    """By the kernels of this machine, in plain torch and in the loop of a GPU; batches of 1, 3, 8 and 40 requests. An
    engine that keeps floats does not pass.

    T5's encoder writes its layers' keys and values over each other, so there the codes of an engine are gone.
    """
    folder, vocabulary = make(tmp_path, shape), 97 if shape == "t5" else VOCABULARY
    requests, kept = list[Sampled](), dict[int, tuple[Kept, Kept]]()
    for kernels, counts in ("auto", (1, 3, 8, 40)), ("torch", (8,)), ("device-loop", (3,)):
        stage = make_stage(folder, SLOTS, 16, kernels=kernels, kv_dtype="int8")
        engine = TinyEngine(stage, SLOTS, 16)
        of_engine = keeping(engine, engine.rows, [stage])
        for count in counts:
            requests += (new := requests_for(count, count, vocabulary))
            engine.run(new, max_batch=count)
        kept |= of_engine
    oracle, of_floats = Oracle(folder), requests_for(3, 3, vocabulary)
    if shape == "t5":
        oracle.check_without_codes(requests)
    else:
        oracle.check(requests, kept)
    TinyEngine(make_stage(folder, 480, 16), 480, 16).run(of_floats)
    with pytest.raises(AssertionError):
        oracle.check_without_codes(of_floats)


@pytest.mark.parametrize("kernels", instruction_sets())
def test_each_instruction_set(tmp_path: Path, kernels: str) -> None:
    folder, requests = make(tmp_path, "llama, 2 K/V heads"), requests_for(8, 3)
    stage = make_stage(folder, 480, 16, kernels=kernels, kv_dtype="int8")
    engine = TinyEngine(stage, 480, 16)
    kept = keeping(engine, engine.rows, [stage])
    engine.run(requests)
    Oracle(folder).check(requests, kept)


@pytest.mark.parametrize(
    ("shape", "tp", "pp"),
    [("llama, 2 K/V heads", 2, 1), ("gpt2", 1, 2), ("qwen3, large heads", 2, 2), ("gptj", 2, 1), ("neox", 1, 2)],
)
async def test_several_ranks_and_a_recovery(tmp_path: Path, shape: str, tp: int, pp: int) -> None:
    """All ranks form again in the middle, and requests start again with what they have made."""
    folder, requests = make(tmp_path, shape), requests_for(8, 3)
    async with in_process(folder, tp, pp, slots=600, kv_dtype="int8") as (master, ranks):
        running = requests[:4]
        await master.collect(await master.issue(running, []))
        await master.collect(await master.issue([], running))
        formed = await master.form()
        assert [one.slot_bytes for one in formed] == [rank.stage._kv.block_bytes // 4 for rank in ranks]
        for request in running:
            assert len(request.made) == 2
        kept = keeping(master, master.held, [rank.stage for rank in ranks], tp)
        await master.run(requests)
    Oracle(folder).check(requests, kept)


HEADS: list[tuple[str, dict[str, Any]]] = [
    ("float32", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}),
    ("bfloat16", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}),
    ("bfloat16", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10}),
]


@pytest.mark.parametrize(("kernels", "of"), covering(instruction_sets(), HEADS, strength=1), ids=str)
def test_the_same_bits_in_any_company(
    tmp_path: Path, logits: list[Tensor], kernels: str, of: tuple[str, dict[str, Any]]
) -> None:
    """In any batch and piece, with blocks of any size, and after a recovery."""
    dtype, shape = of
    folder = make_shape(tmp_path, "llama, 2 K/V heads", **shape)
    chance = random.Random(2)
    requests = [
        Sampled([chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 50))], 4, {"logprobs": True})
        for _ in range(20)
    ]
    check_any_company(folder, logits, kernels, dtype, requests, kv_dtype="int8")


class Keeping(Engine):
    """A core and its rank, and the keys and values of ended requests, by their claims."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.rows, self.kept = dict[int, int](), dict[int, tuple[Kept, Kept]]()

    def message(self, batch: ScheduleBatch) -> worker_pb2.Iteration:
        self.rows |= {member.claim: member.row for member in batch.members}
        return super().message(batch)

    def run(self, actions: list[Action], run: Callable[[worker_pb2.Iteration], Any]) -> list[Action]:
        actions = super().run(actions, run)
        for claim, asked in self.asked.items():
            if len(asked.made) == 8 and claim not in self.kept:
                tokens = len(asked.prompt) + 7
                blocks = [self.kv.block_of(self.rows[claim], n) for n in range(-(-tokens // self.block))]
                self.kept[claim] = kept_by([self.stage], 1, blocks, tokens)
        return actions


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_parts_of_prompts_and_shared_blocks(tmp_path: Path, kernels: str) -> None:
    """Prompts that come in parts and begin behind blocks of others have the tokens of whole ones."""
    folder = make(tmp_path, "llama, 2 K/V heads")
    stage = make_stage(folder, 320, 4, kernels=kernels, kv_dtype="int8")
    engine = Keeping(stage, 320, 4, "balanced,positions=9,prefix=tenant")
    chance = random.Random(5)
    common = [chance.randrange(VOCABULARY) for _ in range(21)]
    prompts = [[*common[: chance.randint(1, 21)], *chance.choices(range(VOCABULARY), k=5)] for _ in range(12)]
    actions = list[Action]()
    for prompt in prompts:
        actions += engine.arrive(("a", prompt, 8))
        actions = engine.run(actions, stage.run) if engine.core.in_flight else actions
    engine.finish(actions)
    assert engine.shared > 10
    requests = {claim: Sampled(of.prompt, 8, made=of.made) for claim, of in engine.asked.items()}
    Oracle(folder).check(list(requests.values()), {id(one): engine.kept[claim] for claim, one in requests.items()})


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_another_engine_goes_on(tmp_path: Path, kernels: str) -> None:
    """Codes and scales move with their blocks. An engine with other keys and values refuses them."""
    folder = make_gpt2(tmp_path, heads=2, layers=2, hidden=12, vocab=97, positions=96, seed=5)
    first, second, other = (make_stage(folder, 256, 4, kernels=kernels, kv_dtype=kv) for kv in ("int8", "int8", None))
    source, oracle = served(first), Oracle(folder)
    both = Pair(first, second, source)
    second.pulled = both.ends.put
    for length in (1, 4, 17, 40):
        prompt = [(5 * length + 3 * n) % 97 for n in range(length)]
        held = both.begin(prompt, length % 4)
        pulled = both.pull(held, 8)
        assert (pulled.error, pulled.bytes) == ("", -(-length // 4) * 4 * (2 * 2 * 2 * (6 + 4)))
        request = Sampled(prompt, 8, made=both.go_on(held, 8))
        blocks = [second._kv.block_of(3, n) for n in range(-(-(length + 7) // 4))]
        oracle.check([request], {id(request): kept_by([second], 1, blocks, length + 7)})
    elsewhere = Pair(first, other, source, numbers=both.numbers)
    other.pulled = elsewhere.ends.put
    assert "int8" in elsewhere.pull(elsewhere.begin([1, 2, 3], 2), 4).error


def test_memory_holds_more_tokens(tmp_path: Path) -> None:
    """The plan and the rank's report count codes and scales; and with them the fingerprint is another one."""
    folder = make_shape(tmp_path, "llama, 2 K/V heads", head_dim=64)
    checkpoint = read_checkpoint(folder)
    plans = [topology(checkpoint, 2, 1, Types.of("bfloat16", kv))[0] for kv in (None, "int8")]
    assert [plan.slot_bytes for plan in plans] == [2 * 2 * 64 * 2, 2 * 2 * (64 + 4)]
    assert plans[0].weight_bytes == plans[1].weight_bytes
    stages = [make_stage(folder, 64, 16, "bfloat16", kv_dtype=kv) for kv in (None, "int8")]
    for stage, plan in zip(stages, plans, strict=True):
        kv = stage._kv
        assert kv.keys.nbytes + kv.values.nbytes == 64 * 2 * plan.slot_bytes
        assert stage.form(16).slot_bytes == 2 * plan.slot_bytes
    assert stages[0].weights != stages[1].weights


def test_a_gpu_refuses() -> None:
    with pytest.raises(FailedPrecondition, match=r"^kv_dtype: int8 is read on a CPU alone, and this rank has a GPU"):
        choose_types("bfloat16", "int8", torch.device("cuda"), Compute())
    assert choose_types("bfloat16", "int8", torch.device("cpu"), Compute()) == Types("bfloat16", "int8", "bfloat16")
