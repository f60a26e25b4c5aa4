"""Times each Triton kernel against its floor.

    python -m orca_lab.cuda_kernels --model gpt3-13b --batch 1 8 32 64 --context 600

One layer's kernels, its four matrix products (cuBLAS, and with weights in codes) and the sampling, at tensor parallel
degree 1. Each is captured in a CUDA graph many times over, so that the host's launches do not count. Keys, values and
weights are taken from more memory than a cache holds.

The floor is a datasheet's (roofline.py). Beside it stands the bandwidth of a copy, measured in the same run.

**Not run on a GPU yet.** Without one it runs in Triton's interpreter (TRITON_INTERPRET=1), whose times mean nothing.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor
from torch.nn import functional

from orca_kernels.triton.activation import bias_act
from orca_kernels.triton.attention import split_attention
from orca_kernels.triton.codes import Coded, coded
from orca_kernels.triton.draws import Draws
from orca_kernels.triton.linear import linear
from orca_kernels.triton.norm import Norm, add_norm
from orca_kernels.triton.plan import Plan, plan_batch
from orca_kernels.triton.sampling import greedy, sample
from orca_kernels.triton.write_kv import write_kv
from orca_worker.models.gpt2.configuration import GPT2Config
from orca_worker.rank.app import open_device

from .roofline import Work, accelerator
from .shapes import SHAPES

BLOCK_SIZE = 16
NOT_CACHED = 2**28  # bytes: some times the L2 cache of an H100 (50 MB)
# Formats of weights: bits, inputs that share a point, inputs that share a scale, whether there are points.
CODED = {"int8": (8, 128, 128, False), "int4": (4, 32, 128, True), "4 bits by 128": (4, 128, 128, True)}
RUNS = 24  # of a kernel in a graph
REPETITIONS = 10


@dataclass(frozen=True)
class Timed:
    """A kernel with its arguments. `work`: the bytes that must be moved, and the FLOP."""

    kernel: str
    case: str
    work: Work
    run: Callable[[], object]


class Layer:
    """The arguments of a layer's kernels."""

    def __init__(self, config: GPT2Config, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def attention(self, case: str, lengths: Sequence[int], contexts: Sequence[int]) -> Iterator[Timed]:
        """The K/V write and split attention of a batch."""
        heads, size = self.config.heads, self.config.head_size
        totals = [length + context for length, context in zip(lengths, contexts, strict=True)]
        each = [-(-total // BLOCK_SIZE) for total in totals]
        ids = torch.randperm(sum(each)).split(each)
        table = torch.zeros((len(each), max(each)), dtype=torch.int64)
        slots = []
        for i, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
            table[i, : each[i]] = ids[i]
            at = torch.arange(context, context + length)
            slots.append(table[i, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
        plan: Plan = plan_batch(table.numpy(), lengths, contexts, torch.cat(slots).numpy(), group=1, device=self.device)
        token = heads * size * self.dtype.itemsize  # bytes of a query, a key, a value, a result
        copies = -(-NOT_CACHED // (2 * sum(each) * BLOCK_SIZE * token)) if self.device.type == "cuda" else 1
        layers = [
            (self.random(sum(each), heads, BLOCK_SIZE, size), self.random(sum(each), heads, BLOCK_SIZE, size))
            for _ in range(copies)
        ]
        turn = cycle(layers)
        qkv = self.random(sum(lengths), 3 * heads * size)
        q = write_kv(qkv, *layers[0], plan)
        scale = size**-0.5
        pairs = sum(n * c + n * (n + 1) // 2 for n, c in zip(lengths, contexts, strict=True))
        new, kept = sum(lengths), sum(totals)
        yield Timed("write_kv", case, Work(4 * new * token, 0), lambda: write_kv(qkv, *next(turn), plan))
        yield Timed(
            "split_attention",
            case,
            Work((2 * new + 2 * kept) * token, 4 * heads * size * pairs),
            lambda: split_attention(q, *next(turn), plan, scale),
        )

    def elementwise(self, tokens: int) -> Iterator[Timed]:
        """The work that is done token by token. A batch's hidden states are in the cache, as they are in a model."""
        hidden, inner, case = self.config.hidden, self.config.inner, f"{tokens} tokens"
        x, residual, up = self.random(tokens, hidden), self.random(tokens, hidden), self.random(tokens, inner)
        norm = Norm(self.random(hidden), self.random(hidden), 1e-5)
        bias = self.random(inner)
        yield Timed("add_norm", case, Work(4 * x.nbytes, 0), lambda: add_norm(x, residual, norm))
        yield Timed("bias_act", case, Work(2 * up.nbytes, 0), lambda: bias_act(up, bias, self.config.activation))

    def products(self, tokens: int) -> Iterator[Timed]:
        """The four matrix products, each with enough copies of its weights that no cache holds them."""
        hidden, inner = self.config.hidden, self.config.inner
        sides = {
            "qkv": (hidden, 3 * hidden),
            "projection": (hidden, hidden),
            "up": (hidden, inner),
            "down": (inner, hidden),
        }
        for name, (ins, outs) in sides.items():
            x = self.random(tokens, ins)
            copies = -(-NOT_CACHED // (ins * outs * x.itemsize)) if self.device.type == "cuda" else 1
            turn = cycle([self.random(outs, ins) for _ in range(copies)])
            moved = (ins * outs + tokens * (ins + outs)) * x.itemsize
            needed = Work(moved, 2 * tokens * ins * outs)
            yield Timed(f"matmul {name}", f"{tokens} tokens", needed, partial(_product, x, turn))
            if self.device.type == "cuda":
                yield from self.products_with_codes(name, x, outs, CODED)
            elif name == "projection":  # the interpreter is slow
                yield from self.products_with_codes(name, x, outs, ["int8"])

    def products_with_codes(self, name: str, x: Tensor, outs: int, kinds: Iterable[str]) -> Iterator[Timed]:
        """The same product x [T, ins] -> [T, outs] with weights in codes."""
        tokens, ins = x.shape
        for kind in kinds:
            first = codes(kind, outs, ins, self.device)
            size = sum(part.nbytes for part in first if isinstance(part, Tensor))
            copies = -(-NOT_CACHED // size) if self.device.type == "cuda" else 1
            turn = cycle([first, *(codes(kind, outs, ins, self.device) for _ in range(copies - 1))])
            needed = Work(size + tokens * (ins + outs) * x.itemsize, 2 * tokens * ins * outs)
            run = partial(_product_with_codes, x, turn)
            yield Timed(f"{kind} {name}", f"{tokens} tokens", needed, run)

    def sampling(self, rows: int) -> Iterator[Timed]:
        logits, case = self.random(rows, self.config.vocab_size), f"{rows} rows"
        ones, seeds = torch.ones(rows, dtype=torch.float64, device=self.device), torch.arange(rows, device=self.device)
        none = torch.zeros_like(seeds)
        plain = Draws(ones, none, none.double(), none.double(), seeds, seeds)
        cut = plain._replace(top_k=none + 50, top_p=0.9 * ones)
        yield Timed("greedy", case, Work(logits.nbytes, 0), lambda: greedy(logits))
        yield Timed("sample", case, Work(logits.nbytes, 0), lambda: sample(logits, plain))
        yield Timed("sample, top-k and top-p", case, Work(logits.nbytes, 0), lambda: sample(logits, cut))


def _product(x: Tensor, weights: Iterator[Tensor]) -> Tensor:
    return functional.linear(x, next(weights))


def _product_with_codes(x: Tensor, weights: Iterator[Coded]) -> Tensor:
    return linear(x, next(weights))


def codes(kind: str, outputs: int, inputs: int, device: torch.device) -> Coded:
    """Random weights of one of CODED."""
    bits, step, scaled, has_points = CODED[kind]

    def of_groups(each: int) -> Tensor:
        return torch.randint(-8, 8, (outputs, -(-inputs // each)), dtype=torch.int8, device=device)

    scales = of_groups(scaled).to(torch.float32 if bits == 8 or scaled > step else torch.float16)
    points = of_groups(step) if has_points else None
    return coded(of_groups(1), scales, points, bits=bits, step=step, scaled=scaled, multiplied=scaled > step)


def kernels(layer: Layer, batches: Sequence[int], context: int, prompt: int) -> Iterator[Timed]:
    for batch in batches:
        yield from layer.attention(f"{batch} increments at {context}", [1] * batch, [context - 1] * batch)
        yield from layer.elementwise(batch)
        yield from layer.products(batch)
        yield from layer.sampling(batch)
    yield from layer.attention(f"an initiation of {prompt}", [prompt], [0])
    rest = max(batches) - 1
    mixed = f"an initiation of {prompt}, {rest} increments at {context}"
    yield from layer.attention(mixed, [prompt, *[1] * rest], [0, *[context - 1] * rest])
    yield from layer.elementwise(prompt)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median time of a run."""
    run()  # compiles
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(RUNS):
            run()
    times = []
    for _ in range(REPETITIONS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / RUNS)
    return statistics.median(times)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written."""
    size = NOT_CACHED if device.type == "cuda" else 2**20
    x, y = torch.zeros((2, size), dtype=torch.uint8, device=device)
    return 2 * size / seconds(lambda: y.copy_(x), device)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="gpt3-13b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, default=600, help="tokens that an increment sees")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of an initiation")
    given = parser.parse_args(arguments)
    device = open_device(given.device, 0)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    known = accelerator(name)
    copy = copy_bandwidth(device)
    print(json.dumps({"device": name, "copy_bytes_per_second": copy}), flush=True)
    peak = "bfloat16" if given.dtype == "float16" else given.dtype  # the same
    layer = Layer(SHAPES[given.model].config, getattr(torch, given.dtype), device)
    with torch.inference_mode():
        for one in kernels(layer, given.batch, given.context, given.prompt):
            took = seconds(one.run, device)
            floor = one.work.floor(known, peak) if known is not None else None
            row = {
                "kernel": one.kernel,
                "case": one.case,
                "microseconds": took * 1e6,
                "floor_microseconds": floor * 1e6 if floor is not None else None,
                "share_of_copy_bandwidth": one.work.bytes / took / copy,
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
