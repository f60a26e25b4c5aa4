"""The cost of an iteration: the time of a stage for a batch, of a hop between stages, and of the host.

`A100` is a model of the paper's machines for GPT shapes, from the sizes of its operations. Its constants are fitted to
FasterTransformer's own tables (docs/lab.md); no GPU of ours has confirmed it. `Calibrated` is fitted to the stage
reports of a system that ran.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple, Protocol

from orca_scheduler.core.core import Member


class Load(NamedTuple):
    """The work that a batch is for a stage: sums over its requests."""

    rows: int  # requests
    increments: int  # of them with one position, behind others
    context: int  # of the increments: positions whose keys and values are read, their own among them
    prompt: int  # positions of all other requests
    square: int  # of each of them, positions times the context at its last one
    reach: int  # of each of them, the context at its last position
    outputs: int  # positions with a token: what the head computes

    @property
    def tokens(self) -> int:
        """Rows of the flat batch."""
        return self.increments + self.prompt


def load_of(members: Iterable[Member]) -> Load:
    """The sums of a batch."""
    rows = increments = context = prompt = square = reach = outputs = 0
    for member in members:
        start, count = member[2], member[3]
        rows += 1
        outputs += member[4]
        if count == 1 and start:
            increments += 1
            context += start + 1
        else:
            prompt += count
            reach += start + count
            square += count * (start + count)
    return Load(rows, increments, context, prompt, square, reach, outputs)


class Cost(Protocol):
    """Seconds of an engine's parts."""

    @property
    def stages(self) -> int: ...

    @property
    def host(self) -> float:
        """The seconds from the return of a batch until stage 0 may begin the next one: selection and messages."""
        ...

    def stage(self, stage: int, load: Load) -> float:
        """A stage's time for a batch."""
        ...

    def hop(self, load: Load) -> float:
        """The seconds from a stage's end until the next one has its output."""
        ...

    @property
    def pull(self) -> float:
        """For the keys and values of one position from another engine, on the rank that has the most of them."""
        ...


@dataclass(frozen=True)
class Constant:
    """Each stage takes the same time for every batch: for tests, and for the timed model of the bench."""

    seconds: float
    stages: int = 1
    host: float = 0.0
    hop_seconds: float = 0.0
    pull: float = 0.0

    def stage(self, stage: int, load: Load) -> float:
        return self.seconds

    def hop(self, load: Load) -> float:
        return self.hop_seconds


# -- the paper's machines


@dataclass(frozen=True)
class Hardware:
    """One GPU, and what efficiency its kernels reach. Rates per second."""

    name: str
    bandwidth: float  # bytes
    flops: float  # in 16 bits
    usable: float  # bytes for weights, keys and values
    of_bandwidth: float = 0.85  # in products
    of_flops: float = 0.65
    attention: float = 0.6  # of the bandwidth
    elementwise: float = 0.7
    kernels: float = 100e-6  # s a layer: launches, without graphs
    network: float = 20e9  # bytes to another machine
    message: float = 30e-6  # s of a send
    nvlink: float = 230e9


A100_40 = Hardware("a100-40", 1.555e12, 312e12, 36e9)
A100_80 = replace(A100_40, name="a100-80", bandwidth=2.04e12, usable=72e9)
HARDWARE = {one.name: one for one in (A100_40, A100_80)}
ALL_REDUCE = {1: 0.0, 2: 20e-6, 4: 23e-6, 8: 35e-6}  # s of a small one by tensor ranks
ITEM = 2  # bytes of float16


@dataclass(frozen=True)
class Gpt:
    """Sizes of a GPT model, as in the paper's Table 1."""

    name: str
    layers: int
    hidden: int
    positions: int = 2048
    vocabulary: int = 50257

    @property
    def parameters(self) -> int:
        """Weights and biases of layers, both embeddings, the last norm. The head is the token embedding."""
        per_layer = 12 * self.hidden**2 + 13 * self.hidden
        return self.layers * per_layer + (self.vocabulary + self.positions + 2) * self.hidden


TABLE_1 = {  # with intra- and inter-layer partitions
    "13b": (Gpt("13b", 40, 5120), 1, 1),
    "101b": (Gpt("101b", 80, 10240), 8, 1),
    "175b": (Gpt("175b", 96, 12288), 8, 2),
    "341b": (Gpt("341b", 120, 15360), 8, 4),
}


@dataclass(frozen=True)
class A100:
    """A GPT model on `tp` x `pp` GPUs, layer by layer. `phi` multiplies the time of stages: FasterTransformer's control
    messages over NCCL, an input taken from the paper's Figure 9c, where it is at most 1.47."""

    model: Gpt
    tp: int
    pp: int
    hardware: Hardware = A100_40
    phi: float = 1.0
    host: float = 1e-3

    @property
    def stages(self) -> int:
        return self.pp

    @property
    def layers(self) -> int:
        """Layers of the largest stage."""
        return -(-self.model.layers // self.pp)

    def stage(self, stage: int, load: Load) -> float:
        return self.pass_seconds(load.tokens, load.context + load.reach)

    def pass_seconds(self, tokens: int, context: int) -> float:
        """A stage's time for a flat batch of `tokens` rows, whose requests read `context` positions together."""
        h, t, on = self.model.hidden, self.tp, self.hardware
        matrices = 12 * h * h / t  # elements of a layer's matrices on a rank
        memory = ITEM * matrices / (on.bandwidth * on.of_bandwidth)
        compute = 2 * matrices * tokens / (on.flops * on.of_flops)
        products = (memory**4 + compute**4) ** 0.25
        attention = 2 * ITEM * h * context / t / (on.attention * on.bandwidth)
        others = 16 * ITEM * tokens * h / (on.elementwise * on.bandwidth) / (1 if t == 1 else 2)
        sums = 0.0 if t == 1 else 2 * (ALL_REDUCE[t] + 2 * (t - 1) / t * ITEM * tokens * h / on.nvlink)
        return self.phi * self.layers * (products + attention + others + sums + on.kernels)

    def hop(self, load: Load) -> float:
        return self.hop_seconds(load.tokens)

    def hop_seconds(self, tokens: int) -> float:
        """The way of `tokens` hidden states to the next stage, over the network of each GPU."""
        return self.hardware.message + ITEM * tokens * self.model.hidden / self.tp / self.hardware.network

    @property
    def pull(self) -> float:
        """Over the network of each GPU, as between stages: each rank pulls its part from the rank of its place."""
        return self.slot_bytes / self.hardware.network

    # memory

    @property
    def weight_bytes(self) -> float:
        """Of the fullest GPU: its part of its layers, and of the token embedding, which is also the head."""
        h = self.model.hidden
        return ITEM * (self.layers * 12 * h * h + self.model.vocabulary * h) / self.tp

    @property
    def slot_bytes(self) -> float:
        """Bytes that a GPU needs for the key and value of one token in its layers."""
        return 2 * ITEM * self.layers * self.model.hidden / self.tp

    @property
    def slots(self) -> int:
        """Tokens whose keys and values fit beside the weights; 0: not even these fit."""
        return max(0, int((self.hardware.usable - self.weight_bytes) // self.slot_bytes))

    def allocates(self, requests: int) -> bool:
        """Whether keys and values of the model's longest sequence fit for all requests: FasterTransformer's rule."""
        return requests * self.model.positions <= self.slots

    @property
    def floor(self) -> float:
        """Seconds of an iteration at least: each stage reads its weights once."""
        return self.pp * self.weight_bytes / self.hardware.bandwidth

    @classmethod
    def of_the_paper(cls, name: str, phi: float = 1.0) -> "A100":
        """A model of Table 1 on the paper's number of GPUs."""
        model, tp, pp = TABLE_1[name]
        return cls(model, tp, pp, phi=phi)


# -- what ran

TERMS = ("constant", "rows", "increments", "context", "prompt", "square", "outputs")


def terms(load: Load) -> tuple[float, ...]:
    """The numbers that a calibrated stage's time is linear in, in the order of TERMS."""
    return 1.0, load.rows, load.increments, load.context, load.prompt, load.square, load.outputs


@dataclass(frozen=True)
class Calibrated:
    """Linear times of each stage, with what was measured of hops and of the host."""

    coefficients: tuple[tuple[float, ...], ...]  # seconds, of each stage, by TERMS
    host: float
    hop_seconds: float = 0.0

    @property
    def stages(self) -> int:
        return len(self.coefficients)

    def stage(self, stage: int, load: Load) -> float:
        return sum(c * x for c, x in zip(self.coefficients[stage], terms(load), strict=True))

    def hop(self, load: Load) -> float:
        return self.hop_seconds

    def at_pace(self, pace: float) -> "Calibrated":
        """The same stages, where each iteration takes `pace` times as long."""
        return replace(self, coefficients=tuple(tuple(pace * each for each in stage) for stage in self.coefficients))

    @property
    def pull(self) -> float:
        return 0.0  # not measured, so `plan` gives calibrated engines no roles


def fit(loads: Sequence[Load], seconds: Sequence[float]) -> tuple[float, ...]:
    """Non-negative coefficients by TERMS that make the sum of squared relative errors smallest, times the factor with
    which their sum is that of `seconds`: where like batches scatter, least relative squares lie below their mean.

    The best ones are the plain least squares of those terms that are above 0, so all sets of terms are tried: 127.
    Raises ValueError without a measurement.
    """
    import numpy as np

    if not loads or min(seconds) <= 0:
        raise ValueError("a fit needs measured iterations, each longer than 0 s")
    rows = np.array([terms(load) for load in loads]) / np.array(seconds)[:, None]
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1.0  # a term that no batch had
    rows /= scale
    best, found = float("inf"), np.zeros(len(TERMS))
    for count in range(1, len(TERMS) + 1):
        for chosen in map(list, combinations(range(len(TERMS)), count)):
            part = np.linalg.lstsq(rows[:, chosen], np.ones(len(rows)), rcond=None)[0]
            error = float(((rows[:, chosen] @ part - 1) ** 2).sum())
            if (part >= 0).all() and error < best - 1e-12:
                best, found = error, np.zeros(len(TERMS))
                found[chosen] = part
    found /= scale
    said = float(np.array([terms(load) for load in loads]).dot(found).sum())
    return tuple(map(float, found * (sum(seconds) / said)))


def errors_of(coefficients: Sequence[float], loads: Sequence[Load], seconds: Sequence[float]) -> tuple[float, float]:
    """The mean of the relative errors without their signs, and the relative error of the sum."""
    said = [sum(c * x for c, x in zip(coefficients, terms(load), strict=True)) for load in loads]
    each = [abs(a - b) / b for a, b in zip(said, seconds, strict=True)]
    return sum(each) / len(each), sum(said) / sum(seconds) - 1
