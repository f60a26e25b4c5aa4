"""Weights in eight and four bits: engines make the tokens of transformers that multiplies as docs/weights.md says.

Its arithmetic is written here once more, on transformers' models. An activation in the middle between two codes may
become the one or the other, for the last bits of an engine's float32 are not those of transformers. Of the tokens
here, one in some hundreds is another one for that reason; the logits' median says that the codes are the same.
"""

import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_gpt2, make_shape
from encoder_decoders import make_marian, make_t5
from properties import PART, covering
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.pytorch_utils import Conv1D
from worker.driver import Sampled, TinyEngine, make_stage
from worker.engines import in_process
from worker.fake_cuda import CUDA, fake_cuda
from worker.logits import seen_by

from orca_common.checkpoint import read_checkpoint
from orca_common.errors import FailedPrecondition
from orca_kernels.cpu.library import instruction_sets
from orca_worker.iteration.model import Compute
from orca_worker.models.families import topology
from orca_worker.partition import Types
from orca_worker.stage.stage import Stage

# Those of transformers' modules whose inputs tensor ranks share: a group begins at the first input of each rank.
CUT_ALONG_INPUTS = re.compile(r"(o_proj|down_proj|c_proj|out_proj|fc_out|fc2|dense_4h_to_h|attention\.dense|\.o|\.wo)$")
HEADS = ("lm_head", "embed_out")
WIDE: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 301}  # groups of 128 that are not whole


def codes(x: Tensor, starts: Sequence[int]) -> Tensor:
    """x [R, K] float32 -> the numbers [R, K] float64 that its codes stand for."""
    found = x.double()
    for start, end in zip(starts, [*starts[1:], x.shape[1]], strict=True):
        for first in range(start, end, 128):
            part = x[:, first : min(first + 128, end)]
            largest = part.abs().max(1, keepdim=True).values
            inverse = torch.where(largest < 1e-30, torch.zeros(()), 127.0 / largest)
            code = torch.round(part * inverse)  # half to even
            scale = torch.where(largest < 1e-30, torch.zeros(()), largest / 127.0)
            found[:, first : min(first + 128, end)] = code.double() * scale.double()
    return found


def fours(x: Tensor, starts: Sequence[int]) -> Tensor:
    """The same for weights in four bits: each 32 numbers of a group have a multiplier."""
    found = x.double()
    for start, end in zip(starts, [*starts[1:], x.shape[1]], strict=True):
        for first in range(start, end, 128):
            largest = x[:, first : min(first + 128, end)].abs().max(1, keepdim=True).values
            inverse = torch.where(largest < 1e-30, torch.zeros(()), 120.0 / largest)
            scale = torch.where(largest < 1e-30, torch.zeros(()), largest / 120.0)
            for begin in range(first, min(first + 128, end), 32):
                columns = slice(begin, min(begin + 32, first + 128, end))
                part = x[:, columns] * inverse
                below, above = part.min(1, keepdim=True).values, part.max(1, keepdim=True).values
                multiplier = torch.round(torch.where(below.abs() < above.abs(), above, below) / -8)
                multiplier[multiplier == 0] = 1
                code = torch.round(part / multiplier).clip(-8, 7)
                found[:, columns] = code.double() * multiplier.double() * scale.double()
    return found


Quantized = Callable[[Tensor, Sequence[int]], Tensor]
WEIGHTS: dict[str | None, Quantized] = {"int8": codes, "int4": fours}
AS_THEY_ARE: dict[str | None, Quantized] = {None: lambda x, starts: x.double()}  # of weights that a file has in codes


def multiply(weight: Tensor, bias: Tensor | None, starts: Sequence[int], x: Tensor) -> Tensor:
    y = codes(x.reshape(-1, x.shape[-1]).float(), starts) @ weight.t()
    return (y if bias is None else y + bias.double()).float().view(*x.shape[:-1], -1)


class Oracle:
    """A checkpoint in transformers, quantized as on `tp` tensor ranks, one or two."""

    def __init__(self, folder: Path, tp: int, quantize: str | None) -> None:
        kind = AutoModelForSeq2SeqLM if read_checkpoint(folder).has_encoder else AutoModelForCausalLM
        self.model: Any = kind.from_pretrained(folder, dtype=torch.float32).eval()
        changed, quantized = 0, (WEIGHTS | AS_THEY_ARE)[quantize]
        for name, module in self.model.named_modules():
            if not isinstance(module, torch.nn.Linear | Conv1D) or name in HEADS:
                continue
            weight = module.weight.detach()
            weight = weight.t().contiguous() if isinstance(module, Conv1D) else weight
            middle = -(-weight.shape[1] // 2)
            starts = [0, middle] if tp == 2 and CUT_ALONG_INPUTS.search(name) else [0]
            owner: Any = module
            owner.forward = partial(multiply, quantized(weight.float(), starts), module.bias, starts)
            changed += 1
        assert changed

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], made: Sequence[int]) -> Tensor:
        """[made, V]: those of which each token was made."""
        if not self.model.config.is_encoder_decoder:
            ids = torch.tensor([[*prompt, *made[:-1]]])
            return self.model(ids, use_cache=False).logits[0, len(prompt) - 1 :]
        start = self.model.config.decoder_start_token_id
        ids = torch.tensor([[start, *made[:-1]]])
        return self.model(torch.tensor([list(prompt)]), decoder_input_ids=ids, use_cache=False).logits[0]


def make(folder: Path, shape: str) -> tuple[Path, int]:
    """A checkpoint, and its vocabulary."""
    if shape == "gpt2":
        sizes: dict[str, Any] = {"heads": 6, "layers": 2, "hidden": 192, "vocab": 211, "positions": 64}
        return make_gpt2(folder, **sizes, seed=4, initializer_range=0.3), 211
    if shape == "t5":
        return make_t5(folder, seed=1, tied=False, num_heads=4, d_kv=40, d_ff=301), 97
    if shape == "marian":
        heads: dict[str, Any] = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
        return make_marian(folder, seed=1, d_model=160, decoder_ffn_dim=301, **heads), 97
    wide: dict[str, Any] = {"n_embd": 192, "n_inner": 301} if shape.startswith("gptj") else WIDE
    return make_shape(folder, shape, **wide), 211


def requests_for(vocabulary: int, count: int, seed: int = 5) -> list[Sampled]:
    chance = random.Random(seed)
    lengths = [1, 17, *(chance.randint(2, 30) for _ in range(count))]
    return [Sampled([chance.randrange(vocabulary - 1) for _ in range(n)], 8) for n in lengths[:count]]


def check_tokens(oracle: Oracle, requests: Sequence[Sampled]) -> None:
    """Each token against the one that follows those before it."""
    right = [
        oracle.logits(request.prompt, request.made).argmax(1) == torch.tensor(request.made) for request in requests
    ]
    assert torch.cat(right).float().mean() >= 0.98
    assert len({tuple(request.made) for request in requests}) > 4, "a model that answers all alike tests nothing"


MANY = 40 if PART == 1 else 16  # requests
FAMILIES = (
    "gpt2",
    "llama, 2 K/V heads",
    "llama, tied, biases, 1 K/V head, large heads",
    "qwen2, a window in the upper layer",
    "qwen3, large heads",
    "gemma3, windows but in one layer",
    "neox",
    "gptj",
    "t5",
    "marian",
)


each_format = pytest.mark.parametrize("quantize", WEIGHTS)


@pytest.mark.parametrize(("shape", "quantize"), covering(FAMILIES, list(WEIGHTS), strength=1))
def test_tokens_equal_an_independent_implementation(tmp_path: Path, shape: str, quantize: str) -> None:
    """By the kernels of this machine and in plain torch; 1, 3, 8 and more requests in one stage."""
    folder, vocabulary = make(tmp_path, shape)
    requests = list[Sampled]()
    for kernels, counts in ("auto", (1, 3, 8, MANY)), ("torch", (8,)):
        engine = TinyEngine(make_stage(folder, 40 * 48, 16, kernels=kernels, quantize=quantize), 40 * 48, 16)
        for count in counts:
            requests += (new := requests_for(vocabulary, count, seed=count))
            engine.run(new)
    check_tokens(Oracle(folder, 1, quantize), requests)


@pytest.mark.parametrize(("kernels", "quantize"), covering([*instruction_sets(), "torch"], list(WEIGHTS), strength=1))
def test_the_codes_are_the_same(tmp_path: Path, kernels: str, quantize: str) -> None:
    """Another rounding, or groups that begin elsewhere, would move each logit by about 0.02."""
    folder, vocabulary = make(tmp_path, "llama, 2 K/V heads")
    oracle = Oracle(folder, 1, quantize)
    requests = [Sampled(one.prompt, 4, {"logprobs": True}) for one in requests_for(vocabulary, 12)]
    stage = make_stage(folder, 400, 16, kernels=kernels, quantize=quantize)
    errors = [(logits - oracle.logits(tokens, [0])[0]).abs().max() for tokens, logits in seen_by(stage, requests)]
    assert torch.stack(errors).median() < 1e-4


CUTS = ((2, 2), (2, 1), (1, 2))[: 2 if PART > 1 else 3]  # tp, pp: a tensor rank's inputs begin within a matrix
MODELS = (("gpt2", "int8"), ("llama, 2 K/V heads", "int4"), ("t5", "int8"))


@pytest.mark.parametrize(("model", "cut"), covering(MODELS, CUTS, strength=1), ids=str)
async def test_several_ranks(tmp_path: Path, model: tuple[str, str], cut: tuple[int, int]) -> None:
    (shape, quantize), (tp, pp) = model, cut
    folder, vocabulary = make(tmp_path, shape)
    async with in_process(folder, tp, pp, slots=600, quantize=quantize) as (master, _):
        requests = requests_for(vocabulary, 8)
        await master.run(requests)
    check_tokens(Oracle(folder, tp, quantize), requests)


@each_format
@pytest.mark.parametrize("tp", [1, 2])
def test_the_plan_counts_codes_and_scales(tmp_path: Path, tp: int, quantize: str) -> None:
    folder = make_shape(tmp_path, "llama, 2 K/V heads", **WIDE)
    shares = topology(read_checkpoint(folder, quantize), tp, 1, Types.of("bfloat16"))

    def row(inputs: int) -> int:
        """Bytes of an output: codes, multipliers, scales."""
        codes = inputs if quantize == "int8" else -(-inputs // 2) + -(-inputs // 32)
        return codes + -(-inputs // 128) * 4

    inner = [301] if tp == 1 else [151, 150]
    for share, mine in zip(shares, inner, strict=True):
        heads, vocabulary = 192 // tp, len(share.slices["embed_tokens.weight"].ranges[0])
        along_outputs = (heads + 2 * 64 // tp + 2 * mine) * row(192)  # q, k, v, gate, up
        along_inputs = 192 * (row(heads) + row(mine))
        assert share.weight_bytes == 2 * (along_outputs + along_inputs) + 2 * (2 * vocabulary * 192 + 5 * 192)
        assert share.slot_bytes == 2 * 2 * 2 * 64 // tp


def test_a_gpu_refuses_without_kernels(tmp_path: Path) -> None:
    folder, _ = make(tmp_path, "gpt2")
    with fake_cuda():
        stage = Stage(read_checkpoint(folder, "int8"), Types.of("bfloat16"), CUDA, 400, Compute(kernels="torch"))
        with pytest.raises(
            FailedPrecondition, match=r"^quantize: int8 needs Triton's kernels on a GPU: kernels is torch"
        ):
            stage.form(16)
