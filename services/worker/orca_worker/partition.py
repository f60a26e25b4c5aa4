"""Which slice of the model a rank holds: intra-layer and inter-layer parallelism (paper sections 4.1 and 6, Figure 6).

The rules, all of them, here alone:

Inter-layer: each stage has an equal share of the layers, in order; a remainder goes to the first stages, one more each,
because the last one also has the final norm, the head and the sampling. The first stage has the embeddings.

Intra-layer, Megatron's (Shoeybi et al., "Megatron-LM", section 3), for tensor rank r of t:

tensor                      kept as        cut
attn.c_attn.weight, bias    [H, 3H], [3H]  columns: the q, the k and the v of this rank's heads, three ranges
attn.c_proj.weight          [H, H]         rows of its heads; the ranks' products are summed by one all-reduce
mlp.c_fc.weight, bias       [H, I], [I]    columns of its share of the inner size
mlp.c_proj.weight           [I, H]         rows of the same share; one all-reduce
attn.c_proj.bias, mlp's     [H]            rank 0 alone: its product carries it into the sum, once
wte.weight, lm_head.weight  [V, H]         rows of its share of the vocabulary; tied embeddings are one tensor, that
                                           the first and the last stage both read
wpe.weight                  [positions, H] rank 0 alone: it goes into the sum of the embeddings, once
ln_1, ln_2, ln_f            [H]            whole

A share of n things is n // t of them, and one more for the first n % t ranks. Heads must come out even; the inner size
and the vocabulary need not (the gathered logits are padded to the widest share and cut again).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from orca_common.checkpoint import Checkpoint
from orca_common.errors import FailedPrecondition

from .models.gpt2_config import GPT2Config

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Place:
    """Where a rank stands in its engine."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    stage: int = 0
    tensor_rank: int = 0

    @property
    def ranks(self) -> int:
        """Of the whole engine."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def index(self) -> int:
        """Its number in the engine: stage-major, then by tensor rank."""
        return self.stage * self.tensor_parallel + self.tensor_rank

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.pipeline_parallel - 1

    @property
    def samples(self) -> bool:
        """The one rank that has the tokens."""
        return self.is_last and self.tensor_rank == 0


SINGLE = Place()


@dataclass(frozen=True)
class Slice:
    """`ranges` along one axis of a tensor, put together in their order, and all of its other axes."""

    name: str  # without a prefix
    shape: tuple[int, ...]  # of the whole tensor
    axis: int
    ranges: tuple[range, ...]

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of the slice."""
        return (*self.shape[: self.axis], sum(map(len, self.ranges)), *self.shape[self.axis + 1 :])

    @property
    def elements(self) -> int:
        return prod(self.size)

    def runs(self) -> Iterator[tuple[int, int]]:
        """(first, count) of elements that lie together in the whole tensor; one behind the other they are the slice."""
        inner = prod(self.shape[self.axis + 1 :])
        first, count = 0, 0
        for outer in range(prod(self.shape[: self.axis])):
            start = outer * self.shape[self.axis]
            for part in self.ranges:
                begin = (start + part.start) * inner
                if begin != first + count:
                    if count:
                        yield first, count
                    first, count = begin, 0
                count += len(part) * inner
        if count:
            yield first, count


def share(n: int, parts: int, index: int) -> range:
    """Part `index` of n things in a row: equal shares, the first n % parts of them with one more."""
    each, more = divmod(n, parts)
    start = index * each + min(index, more)
    return range(start, start + each + (index < more))


def check_gpt2(config: GPT2Config, tensor_parallel: int, pipeline_parallel: int) -> None:
    """Raises FailedPrecondition with a sentence when the model cannot be cut in this way."""
    tp, pp = tensor_parallel, pipeline_parallel
    if tp < 1 or pp < 1:
        raise FailedPrecondition(f"an engine of {tp} x {pp} ranks (tp x pp): each must be at least 1")
    if config.heads % tp:
        raise FailedPrecondition(f"tp {tp}: {config.heads} heads cannot be shared evenly by {tp} tensor ranks")
    if config.layers < pp:
        raise FailedPrecondition(f"pp {pp}: {config.layers} layers are too few for {pp} stages")
    for what, n in (("an inner size", config.inner), ("a vocabulary", config.vocab_size)):
        if n < tp:
            raise FailedPrecondition(f"tp {tp}: {what} of {n} is too small for {tp} tensor ranks")


def check_partition(checkpoint: Checkpoint, tensor_parallel: int, pipeline_parallel: int) -> None:
    """The same for a checkpoint of any known model."""
    if checkpoint.model_type == "gpt2":
        check_gpt2(GPT2Config.read(checkpoint), tensor_parallel, pipeline_parallel)


def layers_of(config: GPT2Config, place: Place) -> range:
    return share(config.layers, place.pipeline_parallel, place.stage)


def gpt2_slices(config: GPT2Config, place: Place) -> Mapping[str, Slice]:
    """By name, every tensor of which the rank holds something."""
    tp, rank = place.tensor_parallel, place.tensor_rank
    hidden, inner = config.hidden, config.inner
    heads, mlp = share(config.heads, tp, rank), share(inner, tp, rank)
    attention = range(heads.start * config.head_size, heads.stop * config.head_size)
    qkv = tuple(range(part * hidden + attention.start, part * hidden + attention.stop) for part in range(3))
    vocabulary = (share(config.vocab_size, tp, rank),)
    slices: dict[str, Slice] = {}

    def cut(name: str, shape: tuple[int, ...], axis: int, ranges: tuple[range, ...]) -> None:
        slices[name] = Slice(name, shape, axis, ranges)

    def whole(name: str, *shape: int) -> None:
        cut(name, shape, 0, (range(shape[0]),))

    def norm(name: str) -> None:
        whole(name + ".weight", hidden)
        whole(name + ".bias", hidden)

    if place.is_first:
        cut("wte.weight", (config.vocab_size, hidden), 0, vocabulary)
        if rank == 0:
            whole("wpe.weight", config.positions, hidden)
    for index in layers_of(config, place):
        layer = f"h.{index}."
        norm(layer + "ln_1")
        cut(layer + "attn.c_attn.weight", (hidden, 3 * hidden), 1, qkv)
        cut(layer + "attn.c_attn.bias", (3 * hidden,), 0, qkv)
        cut(layer + "attn.c_proj.weight", (hidden, hidden), 0, (attention,))
        norm(layer + "ln_2")
        cut(layer + "mlp.c_fc.weight", (hidden, inner), 1, (mlp,))
        cut(layer + "mlp.c_fc.bias", (inner,), 0, (mlp,))
        cut(layer + "mlp.c_proj.weight", (inner, hidden), 0, (mlp,))
        if rank == 0:
            whole(layer + "attn.c_proj.bias", hidden)
            whole(layer + "mlp.c_proj.bias", hidden)
    if place.is_last:
        norm("ln_f")
        head = "wte.weight" if config.tied else "lm_head.weight"
        cut(head, (config.vocab_size, hidden), 0, vocabulary)
    return slices


@dataclass(frozen=True)
class RankShare:
    """What one rank of an engine holds."""

    stage: int
    tensor_rank: int
    layers: range
    slices: Mapping[str, Slice]
    weight_bytes: int
    slot_bytes: int  # keys and values of one token


def topology(checkpoint: Checkpoint, tensor_parallel: int, pipeline_parallel: int, dtype: str) -> list[RankShare]:
    """The ranks of an engine, in their order, before anything runs. Raises FailedPrecondition with a sentence."""
    check_partition(checkpoint, tensor_parallel, pipeline_parallel)
    ranks = []
    for index in range(tensor_parallel * pipeline_parallel):
        stage, rank = divmod(index, tensor_parallel)
        if checkpoint.model_type != "gpt2":
            ranks.append(RankShare(stage, rank, range(0), {}, 0, 0))
            continue
        config = GPT2Config.read(checkpoint)
        place = Place(tensor_parallel, pipeline_parallel, stage, rank)
        layers, slices, item = layers_of(config, place), gpt2_slices(config, place), ITEM_BYTES[dtype]
        heads = config.heads // tensor_parallel
        ranks.append(
            RankShare(
                stage,
                rank,
                layers,
                slices,
                weight_bytes=item * sum(part.elements for part in slices.values()),
                slot_bytes=item * 2 * len(layers) * heads * config.head_size,
            )
        )
    return ranks
