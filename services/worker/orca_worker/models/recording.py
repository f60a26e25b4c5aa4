"""A stage of a model as a recording: the operations of one rank, in their order, without torch and without a device.

A family of models records what it is, once (`models/*/layers.py`). Three backends run a recording: compiled kernels on
a CPU (`cpu.py`), Triton's on a GPU (`cuda.py`), plain torch (`plain.py`). A recording also says which part of each
tensor the rank holds (Shoeybi et al., "Megatron-LM", section 3): columns of a linear operation, or rows, whose products
are summed over the tensor ranks.

Activations are rows [T, width] for the T tokens of a batch (selective batching, paper section 3.2), in buffers that all
layers use again. The first buffer has the hidden states; they are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from orca_common.errors import FailedPrecondition

from ..partition import Place, Slice, Types, share
from .positions import RelativeBias, Sinusoids
from .rotary import Rotary


class Buffer(NamedTuple):
    """Rows [T, width]. An operand is read by linear operations alone, so it may be kept as they multiply it."""

    number: int
    width: int
    is_operand: bool


@dataclass(frozen=True)
class Matrix:
    """Weights [out, in] of a linear operation and its bias [out]: slices of tensors, one below the other."""

    weights: tuple[Slice, ...]
    biases: tuple[Slice, ...] = ()
    transposed: bool = False  # the tensors are kept as [in, out]

    @property
    def outputs(self) -> int:
        return sum(part.size[1] if self.transposed else part.size[0] for part in self.weights)

    @classmethod
    def stacked(cls, matrices: Sequence[Matrix]) -> Matrix:
        """Several that read the same rows, as one: its outputs are theirs, one after the other."""
        weights = tuple(part for each in matrices for part in each.weights)
        return cls(weights, tuple(part for each in matrices for part in each.biases))


@dataclass(frozen=True)
class Norm:
    """LayerNorm or, without a bias, RMSNorm. weight, bias [width]. Of an RMSNorm alone: `scale` and `offset`."""

    weight: Slice
    bias: Slice | None
    epsilon: float
    scale: float = 1.0  # of the result
    offset: float = 0.0  # what the checkpoint's weight lacks: the result is multiplied with weight + offset


@dataclass(frozen=True)
class Attention:
    """The attention of one layer, on this rank's heads. A row of qkv has all its queries, its keys and its values."""

    layer: int  # of this stage
    heads: int
    kv_heads: int  # `heads / kv_heads` query heads share a key/value head
    head_size: int
    scale: float
    rotary: Rotary | None = None
    window: int = 0  # keys that a query sees at most, its own among them; 0: all
    query_norm: Norm | None = None  # of each head, before the rotation
    key_norm: Norm | None = None
    sees_input: bool = False  # a query sees all keys of the encoder's tokens, and no others
    bias: RelativeBias | None = None


@dataclass(frozen=True)
class Embed:
    """states = scale * table's rows + positions' rows, summed over the tensor ranks."""

    table: Slice  # [V of this rank, hidden]
    first_token: int
    scale: float
    positions: Slice | Sinusoids | None


@dataclass(frozen=True)
class Normalize:
    """out = norm(states). `of_head`: only of the rows that go into the head. `in_place`: the states become the same."""

    out: Buffer
    norm: Norm
    of_head: bool = False
    in_place: bool = False


@dataclass(frozen=True)
class Copy:
    """out = states"""

    out: Buffer


@dataclass(frozen=True)
class Linear:
    """out = activation(x W + b)"""

    x: Buffer
    matrix: Matrix
    out: Buffer
    activation: str | None = None


@dataclass(frozen=True)
class Gated:
    """out = activation(x G) * (x U)    (Shazeer, "GLU Variants Improve Transformer")"""

    x: Buffer
    gate: Matrix
    up: Matrix
    out: Buffer
    activation: str


@dataclass(frozen=True)
class WriteKV:
    """Writes the keys and values of rows [T, 2 * kv_heads * head_size] to their slots."""

    kv: Buffer
    attention: Attention


@dataclass(frozen=True)
class Attend:
    """Writes the keys and values of qkv to their slots, then out = attention(queries, all keys and values so far).

    Without `writes` they are there, and a row has queries alone.
    """

    qkv: Buffer
    attention: Attention
    out: Buffer
    writes: bool = True


@dataclass(frozen=True)
class Residual:
    """states += norm(the sum of all terms x W + b, summed over the tensor ranks)"""

    terms: tuple[tuple[Buffer, Matrix], ...]
    norm: Norm | None = None


@dataclass(frozen=True)
class Head:
    """The logits of this rank's share of the vocabulary."""

    x: Buffer
    table: Slice  # [V of this rank, hidden]
    bias: Slice | None  # of as many elements
    never: tuple[int, ...]  # tokens of the share that are never made: their logits are -infinity


Operation = Embed | Normalize | Copy | Linear | Gated | WriteKV | Attend | Residual | Head


@dataclass
class Recording:
    """The operations of one rank. Methods that record raise FailedPrecondition where the model cannot be cut so.

    A model with an encoder has three lists: the encoder's layers of this stage; what makes the keys and values that the
    decoder's layers of this stage have of the encoder's output; the decoder's layers (`parts.py`).
    """

    place: Place
    hidden: int
    vocabulary: int  # tokens, on all ranks
    positions: int  # of a request, at most
    operations: list[Operation] = field(default_factory=list)
    encoder: list[Operation] = field(default_factory=list)  # on the input tokens
    crossing: list[Operation] = field(default_factory=list)  # on the encoder's output, the hidden states to begin with
    start_token: int = 0  # the decoder's first one, where there is an encoder
    prefix_lm: bool = False  # the tokens of a prompt see each other
    slices: dict[str, Slice] = field(default_factory=dict)  # every tensor of which the rank holds something, by name
    matrices: dict[str, tuple[int, int]] = field(default_factory=dict)  # outputs and inputs of those among them
    transposed: set[str] = field(default_factory=set)  # those of the matrices that are kept as [in, out]
    layers: int = 0  # with keys and values
    group: int = 1  # query heads to a key/value head
    kv_heads: int = 0
    head_size: int = 0
    _buffers: list[Buffer] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.vocabulary < (tp := self.place.tensor_parallel):
            raise FailedPrecondition(f"tp {tp}: a vocabulary of {self.vocabulary} is too small for {tp} tensor ranks")
        self.states = self.rows(self.hidden)

    @property
    def has_encoder(self) -> bool:
        return bool(self.crossing)  # a stage may have no layer of the encoder, and has one of the decoder

    # Which part of a tensor the rank holds

    @property
    def tokens(self) -> range:
        """The rank's share of the vocabulary."""
        return self.place.tensor_share(self.vocabulary)

    @property
    def vocabulary_shares(self) -> list[int]:
        """The number of the vocabulary's tokens that each tensor rank has."""
        tp = self.place.tensor_parallel
        return [len(share(self.vocabulary, tp, rank)) for rank in range(tp)]

    def share_of_inner(self, inner: int) -> range:
        """The rank's share of the inner size of a feed-forward network."""
        if inner < (tp := self.place.tensor_parallel):
            raise FailedPrecondition(f"tp {tp}: an inner size of {inner} is too small for {tp} tensor ranks")
        return self.place.tensor_share(inner)

    def share_of_heads(self, heads: int, kv_heads: int) -> tuple[range, range]:
        """The rank's query heads, and the key/value heads that they read; several ranks may hold the same one."""
        tp = self.place.tensor_parallel
        if heads % tp or (kv_heads % tp and tp % kv_heads):
            kinds = f"{heads} heads" if kv_heads == heads else f"{heads} heads and {kv_heads} key/value heads"
            raise FailedPrecondition(f"tp {tp}: {kinds} cannot be shared evenly by {tp} tensor ranks")
        mine = self.place.tensor_share(heads)
        group = heads // kv_heads
        return mine, range(mine.start // group, (mine.stop - 1) // group + 1)

    def slice(self, name: str, shape: tuple[int, ...], axis: int = 0, ranges: Sequence[range] | None = None) -> Slice:
        """A part of a tensor of this shape; the whole of it without ranges along the axis."""
        part = Slice(name, shape, axis, tuple(ranges) if ranges is not None else (range(shape[axis]),))
        assert self.slices.setdefault(name, part) == part, name
        return part

    def matrix(
        self,
        name: str,
        out: int,
        n: int,
        *,
        outs: Sequence[range] | None = None,
        ins: Sequence[range] | None = None,
        bias: bool = True,
        transposed: bool = False,
    ) -> Matrix:
        """The weights [out, n] of `name`, cut along outputs, or along inputs; then rank 0 alone has the bias, because
        the ranks' products are summed."""
        assert outs is None or ins is None
        shape, axis = ((n, out) if transposed else (out, n)), int((ins is not None) != transposed)
        weight = self.slice(name + ".weight", shape, axis, outs if ins is None else ins)
        outputs, inputs = weight.size[::-1] if transposed else weight.size
        self.matrices[weight.name] = outputs, inputs
        if transposed:
            self.transposed.add(weight.name)
        has_bias = bias and (ins is None or self.place.tensor_rank == 0)
        biases = (self.slice(name + ".bias", (out,), 0, outs),) if has_bias else ()
        return Matrix((weight,), biases, transposed)

    def norm(self, name: str, width: int, epsilon: float, *, bias: bool = True, **more: float) -> Norm:
        """`more`: fields of Norm."""
        weight = self.slice(name + ".weight", (width,))
        return Norm(weight, self.slice(name + ".bias", (width,)) if bias else None, epsilon, **more)

    def attention(self, heads: int, kv_heads: int, head_size: int, scale: float, **more: Any) -> Attention:
        """The attention of the next layer with keys and values; `more`: fields of Attention."""
        made = replace(Attention(self.layers, heads, kv_heads, head_size, scale), **more)
        self.layers, self.group, self.kv_heads, self.head_size = self.layers + 1, heads // kv_heads, kv_heads, head_size
        return made

    def attention_of(self, layer: int, heads: int, head_size: int, scale: float, **more: Any) -> Attention:
        """One of several attentions that keep keys and values in the same layer."""
        made = replace(Attention(layer, heads, heads, head_size, scale), **more)
        self.layers, self.kv_heads, self.head_size = max(self.layers, layer + 1), heads, head_size
        return made

    # Recording

    def rows(self, width: int) -> Buffer:
        return self._buffer(width, is_operand=False)

    def operand(self, width: int) -> Buffer:
        return self._buffer(width, is_operand=True)

    def _buffer(self, width: int, is_operand: bool) -> Buffer:
        self._buffers.append(Buffer(len(self._buffers), width, is_operand))
        return self._buffers[-1]

    @property
    def buffers(self) -> Sequence[Buffer]:
        return self._buffers

    def embed(self, name: str, positions: tuple[str, int] | Sinusoids | None = None, scale: float = 1.0) -> None:
        """The table of tokens, and of learned positions, by name and number, or sinusoids; rank 0 alone has those."""
        table = self.slice(name, (self.vocabulary, self.hidden), 0, [self.tokens])
        added: Slice | Sinusoids | None = None
        if self.place.tensor_rank == 0:
            is_learned = isinstance(positions, tuple)
            added = self.slice(positions[0], (positions[1], self.hidden)) if is_learned else positions
        self.operations.append(Embed(table, self.tokens.start, scale, added))

    def encoder_ends(self) -> None:
        """Ends the encoder's operations. Those that follow make keys and values of its output."""
        self.encoder, self.operations = self.operations, []

    def decoder_begins(self, start_token: int) -> None:
        """The operations that follow are the decoder's, whose first token is `start_token`."""
        self.crossing, self.operations, self.start_token = self.operations, [], start_token

    def normalize(self, out: Buffer, norm: Norm, of_head: bool = False, in_place: bool = False) -> None:
        self.operations.append(Normalize(out, norm, of_head, in_place))

    def copy(self, out: Buffer) -> None:
        self.operations.append(Copy(out))

    def linear(self, x: Buffer, matrix: Matrix, out: Buffer, activation: str | None = None) -> None:
        self.operations.append(Linear(x, matrix, out, activation))

    def gated(self, x: Buffer, gate: Matrix, up: Matrix, out: Buffer, activation: str) -> None:
        self.operations.append(Gated(x, gate, up, out, activation))

    def write_kv(self, kv: Buffer, attention: Attention) -> None:
        self.operations.append(WriteKV(kv, attention))

    def attend(self, qkv: Buffer, attention: Attention, out: Buffer, writes: bool = True) -> None:
        self.operations.append(Attend(qkv, attention, out, writes))

    def residual(self, *terms: tuple[Buffer, Matrix], norm: Norm | None = None) -> None:
        self.operations.append(Residual(terms, norm))

    def head(self, x: Buffer, name: str, bias: Slice | None = None, never: Sequence[int] = ()) -> None:
        """The table of the head, which may be the embedding's. never: tokens that are not made."""
        table = self.slice(name, (self.vocabulary, self.hidden), 0, [self.tokens])
        mine = tuple(token - self.tokens.start for token in never if token in self.tokens)
        self.operations.append(Head(x, table, bias, mine))

    def weight_bytes(self, item: int, of_matrix: Callable[[int, int, int], int]) -> int:
        """Bytes of all slices, where a number has `item` bytes, and a matrix `of_matrix(outputs, inputs, item)`."""
        elements = sum(part.elements for part in self.slices.values())
        in_matrices = sum(outputs * inputs for outputs, inputs in self.matrices.values())
        return item * (elements - in_matrices) + sum(of_matrix(*size, item) for size in self.matrices.values())

    def slot_bytes(self, types: Types) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.layers * self.kv_heads * types.kv_bytes(self.head_size)


def columns(heads: range, head_size: int, start: int = 0) -> range:
    """The columns of heads that lie side by side from `start` on."""
    return range(start + heads.start * head_size, start + heads.stop * head_size)
