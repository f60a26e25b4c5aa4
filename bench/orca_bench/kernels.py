"""Each kernel, and each iteration that they make up, against its floor on this machine.

A CPU's ceilings are measured again in turn with every subject, and like is compared with like: the median time with the
floor of the ceilings' medians, the shortest one with that of their best. A machine that is shared with others reads a
third faster in one second than in the next. A median over the floor of the best second says more of the neighbours than
of the kernel.

To add a kernel, yield a `Subject` from a function like `attentions`, and name that function in `SOURCES`.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from orca.v1 import worker_pb2
from orca.v1.sampling_pb2 import SamplingParams
from orca_common.errors import FailedPrecondition
from orca_kernels.reference import SplitAttention
from orca_lab.roofline import Accelerator, Work
from orca_scheduler.ranks.members import increment, initiation, put_members
from orca_worker.iteration.rows import ROW, Adjusted
from orca_worker.models.recording import Attend, Gated, Head, Linear, Recording, Residual
from orca_worker.partition import ITEM_BYTES
from orca_worker.sampling.sampling import sample

from .cases import fixed, vocabulary_of
from .ceilings import Ceilings, Probe, at_best, of_device
from .engine import Engine, EngineOptions
from .floors import iteration_work, recorded
from .schedule import BLOCK_SIZE, Shape

# (requests, tokens before the iteration) of decoding iterations, and the tokens of one initiation
DECODES = ((1, 32), (8, 128), (32, 32), (32, 128))
PREFILL = 512
DRAWN = 32  # rows of a draw, which all ask for the same
# By the name of a draw: fields of `ROW`, and adjustments.
DRAWS: Mapping[str, tuple[Mapping[str, Any], SamplingParams | None]] = {
    "temperature": ({"temperature": 1}, None),
    "top-k": ({"temperature": 1, "top_k": 50}, None),
    "top-p": ({"temperature": 1, "top_p": 0.9}, None),
    "top-p, flat": ({"temperature": 1, "top_p": 0.9}, None),
    "min-p": ({"temperature": 1, "min_p": 0.05}, None),
    "logprobs": ({"logprobs": True}, None),
    "repetition penalty": ({}, SamplingParams(repetition_penalty=1.1)),
    "form": ({}, SamplingParams(grammar="of bits at random")),
}
COPIES = 256 << 20  # bytes of weights that a product goes through, as much as an iteration of GPT-2 124M in bfloat16
TURN = 0.05  # seconds of a subject's repetitions between two measurements of the ceilings
TIMED = 1.0  # seconds that one subject is repeated for
FEWEST = 5  # repetitions, however long they take


@dataclass(frozen=True)
class Subject:
    """Something to time: its name, the work that it cannot do without, and the call, which can be repeated."""

    name: str
    work: Work
    run: Callable[[], object]


@dataclass(frozen=True)
class Timed:
    """Seconds of each repetition, and what the machine can do: in the median of the same seconds, and at best."""

    seconds: Sequence[float]
    usual: Accelerator | None
    best: Accelerator | None


def data_of(engine: Engine) -> tuple[Recording, int, torch.dtype]:
    """The whole model; bytes and type of an element."""
    dtype, recording = engine.options.dtype, recorded(engine.checkpoint)
    assert recording is not None
    return recording, ITEM_BYTES[dtype], getattr(torch, dtype)


def iterations(engine: Engine) -> Iterator[Subject]:
    """Whole iterations of the stage: control message in, tokens out."""
    vocabulary = vocabulary_of(engine.checkpoint.vocab_size)
    longest = engine.checkpoint.max_positions
    for batch, context in DECODES:
        if context < longest:
            yield iteration(engine, f"decode {batch} x {context}", Shape((), (context,) * batch), vocabulary)
    length = min(PREFILL, longest)
    yield iteration(engine, f"prefill {length}", Shape((length,), ()), vocabulary)


def iteration(engine: Engine, name: str, shape: Shape, vocabulary: range) -> Subject:
    """One iteration, which can be repeated: an initiation begins its rows again, increments keep their position.

    The rows are the stage's first ones, so the next iteration that is made here ends this one.
    """
    stage, rows = engine.stage, range(shape.requests)
    length = max(shape.initiations or shape.contexts)
    blocks = -(-(length + 1) // BLOCK_SIZE)
    begin = worker_pb2.Iteration(free_rows={*rows, *(row for row, _, _ in stage.rows.held())})
    for row, one in enumerate(fixed(shape.requests, length, 1, vocabulary=vocabulary)):
        begin.admissions.add(row=row, claim=row + 1, token_ids=one.prompt)
    put_members(begin, [initiation(row, length, range(row * blocks, (row + 1) * blocks)) for row in rows])
    timed = begin
    if shape.contexts:
        stage.run(begin)
        timed = worker_pb2.Iteration()
        put_members(timed, [increment(row, shape.contexts[row], vocabulary[row]) for row in rows])
    needed = iteration_work(engine.checkpoint, engine.options.dtype, shape.tokens)
    assert needed is not None
    return Subject(name, needed, partial(stage.run, timed))


def products(engine: Engine) -> Iterator[Subject]:
    """The matrix products of a layer and of the head, in plain torch, each over other weights than the one before.

    The weights of one product stay in a cache if it runs again at once, and would then be read faster than an iteration
    can read them. So each repetition takes the next of several copies.
    """
    recording, item, kind = data_of(engine)
    for name, (inputs, outputs) in matrices_of(recording).items():
        weight = torch.randn(outputs, inputs, device=engine.device).to(kind)
        weights = [weight.clone() for _ in range(max(2, COPIES // weight.nbytes))]
        for tokens in (1, 32):
            x = torch.randn(tokens, inputs, device=engine.device).to(kind)
            moved = item * (inputs * outputs + tokens * (inputs + outputs))
            needed = Work(moved, 2 * tokens * inputs * outputs)
            yield Subject(f"torch product {name} x {tokens}", needed, rotating(x, weights))


def matrices_of(recording: Recording) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each product of the first layer, and of the head."""
    attended = {operation.out for operation in recording.operations if isinstance(operation, Attend)}
    found: dict[str, tuple[int, int]] = {}
    for operation in recording.operations:
        match operation:
            case Linear(x, _, out, activation):
                found.setdefault("qkv" if activation is None else "up", (x.width, out.width))
            case Gated(x, _, _, out):
                found.setdefault("gate and up", (x.width, 2 * out.width))
            case Residual(terms):
                for x, _ in terms:
                    found.setdefault("merge" if x in attended else "down", (x.width, recording.hidden))
            case Head(x):
                found["head"] = (x.width, recording.vocabulary)
            case _:
                pass
    return found


def rotating(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> Callable[[], object]:
    """The product of x with one of the weights after the other."""
    turns = itertools.cycle(weights)
    return lambda: torch.nn.functional.linear(x, next(turns))


def attentions(engine: Engine) -> Iterator[Subject]:
    """Split attention of one layer's decoding iteration, planned before, in plain torch."""
    recording, item, kind = data_of(engine)
    heads, group, size = recording.kv_heads, recording.group, recording.head_size
    for batch, context in DECODES:
        blocks = -(-(context + 1) // BLOCK_SIZE)
        table = torch.arange(batch * blocks, device=engine.device).view(batch, blocks)
        slots = table[:, context // BLOCK_SIZE] * BLOCK_SIZE + context % BLOCK_SIZE
        plan = SplitAttention(table, [1] * batch, [context] * batch, slots, heads=heads, block_size=BLOCK_SIZE)
        cache = torch.randn(2, batch * blocks, heads, BLOCK_SIZE, size, device=engine.device).to(kind)
        q = torch.randn(batch, heads * group, size, device=engine.device).to(kind)
        k, v = torch.randn(2, batch, heads, size, device=engine.device).to(kind)
        plan.write(k, v, *cache)
        kept = batch * (context + 1) * heads * size  # elements of the keys, and of the values
        needed = Work(item * 2 * kept, 4 * kept * group)
        yield Subject(f"torch attention {batch} x {context}", needed, partial(plan, q, *cache, size**-0.5))


class Random:
    """`rows.Constraint`: a mask of bits at random."""

    def __init__(self, vocabulary: int) -> None:
        self._bits = np.random.default_rng(1).integers(256, size=-(-vocabulary // 8), dtype=np.uint8)

    def allowed(self) -> np.ndarray:
        return self._bits


def draws(engine: Engine) -> Iterator[Subject]:
    """Tokens from logits that are in memory. Each way to draw must read them once.

    A token's probability falls with the power 1.5 of its rank, as a model's does more or less. In a flat distribution
    top-p keeps some 5,000 tokens of 128,256.
    """
    vocabulary = engine.checkpoint.vocab_size
    ranks = torch.stack([torch.randperm(vocabulary) for _ in range(DRAWN)]) + 1
    steep, flat = -1.5 * ranks.log().to(engine.device), 3 * torch.randn(DRAWN, vocabulary, device=engine.device)
    prompt = list(range(min(PREFILL, vocabulary)))
    for name, (fields, asked) in DRAWS.items():
        table, adjusted = np.zeros(DRAWN, ROW), dict[int, Adjusted]()
        table["prompt"] = len(prompt)
        for field, value in fields.items():
            table[field] = value
        if asked is not None:
            adjusted = {n: Adjusted(asked, prompt, len(prompt)) for n in range(DRAWN)}
            for one in adjusted.values():
                one.answer = Random(vocabulary) if asked.grammar else None
        logits = flat if "flat" in name else steep
        run = partial(sample, logits, table, np.zeros(DRAWN, np.int64), adjusted)
        yield Subject(f"draw {DRAWN}: {name}", Work(logits.nbytes, 0), run)


SOURCES: tuple[Callable[[Engine], Iterator[Subject]], ...] = (iterations, products, attentions, draws)


def time_subject(
    subject: Subject, device: torch.device, seconds: float = TIMED, on: Ceilings | Accelerator | None = None
) -> Timed:
    """Times it again and again, after one repetition that is not counted. Ceilings are measured in turn with it."""
    subject.run()
    times: list[float] = []
    beside: dict[Probe, list[float]] = {probe: [] for probe in (on.probes if isinstance(on, Ceilings) else ())}
    while len(times) < FEWEST or sum(times) < seconds:
        for probe, taken in beside.items():
            taken.append(probe.seconds())
        turn = len(times)
        while len(times) == turn or sum(times[turn:]) < TURN:
            synchronize(device)
            started = time.perf_counter()
            subject.run()
            synchronize(device)
            times.append(time.perf_counter() - started)

    def roof(of: Callable[[Sequence[float]], float]) -> Accelerator | None:
        return on.roofline(lambda probe: of(beside[probe])) if isinstance(on, Ceilings) else on

    return Timed(times, roof(statistics.median), roof(min))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def subject_line(subject: Subject, timed: Timed, where: Mapping[str, Any]) -> dict[str, Any]:
    """The line of a subject that was timed at `where`; without known ceilings its floors are None."""
    line: dict[str, Any] = {"kernel": subject.name}
    for kind, taken, on in (
        ("", statistics.median(timed.seconds), timed.usual),
        ("least_", min(timed.seconds), timed.best),
    ):
        floor = subject.work.floor(on, where["dtype"]) if on is not None else None
        line[f"{kind}ms"] = round(taken * 1e3, 4)
        line[f"{kind}floor_ms"] = None if floor is None else round(floor * 1e3, 4)
        line[f"{kind}times_floor"] = None if floor is None else round(taken / floor, 2)
    megabytes, gigaflop = round(subject.work.bytes / 1e6, 3), round(subject.work.flop / 1e9, 4)
    return {**line, "MB": megabytes, "GFLOP": gigaflop, "runs": len(timed.seconds), **where}


def lines(options: EngineOptions, only: str = "", seconds: float = TIMED) -> Iterator[dict[str, Any]]:
    """First the machine's ceilings, then each subject whose name contains `only`. Raises FailedPrecondition."""
    checkpoint = options.checkpoint()
    if recorded(checkpoint) is None:
        raise FailedPrecondition(f"model: the kernels of {checkpoint.model_type} are not known to the bench")
    largest = max(*(batch * (context + 1 + BLOCK_SIZE) for batch, context in DECODES), PREFILL + 1 + BLOCK_SIZE)
    engine = Engine(options, checkpoint, largest - largest % BLOCK_SIZE)
    on = of_device(engine.device, engine.options.compute.threads, [engine.options.dtype])
    if (best := at_best(on)) is not None:
        rates = {f"{dtype}_GFLOP_per_s": round(peak / 1e9, 1) for dtype, peak in best.peak.items()}
        yield {"ceilings": best.name, "read_GB_per_s": round(best.bandwidth / 1e9, 2), **rates, **engine.where}
    with torch.inference_mode():
        for source in SOURCES:
            for subject in source(engine):
                if only in subject.name:
                    yield subject_line(subject, time_subject(subject, engine.device, seconds, on), engine.where)
