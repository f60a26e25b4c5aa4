"""Which part of each of GPT-2's tensors a rank holds. All of the rules are here.

Inter-layer: a stage has its share of the layers. The first one also has the embeddings, the last one the final norm and
the head.

Intra-layer, as in Megatron (Shoeybi et al., "Megatron-LM", section 3), for each tensor rank:

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

The heads must divide evenly. The inner size and the vocabulary need not: the logits are padded to the widest share when
they are gathered, and cut again.
"""

from collections.abc import Mapping

from orca_common.errors import FailedPrecondition

from ...partition import Place, Slice, check_stages
from .configuration import GPT2Config


def check_cut(config: GPT2Config, tensor_parallel: int, pipeline_parallel: int) -> None:
    """Raises FailedPrecondition with a sentence when the model cannot be cut in this way."""
    tp = tensor_parallel
    check_stages(config.layers, tp, pipeline_parallel)
    if config.heads % tp:
        raise FailedPrecondition(f"tp {tp}: {config.heads} heads cannot be shared evenly by {tp} tensor ranks")
    for what, n in (("an inner size", config.inner), ("a vocabulary", config.vocab_size)):
        if n < tp:
            raise FailedPrecondition(f"tp {tp}: {what} of {n} is too small for {tp} tensor ranks")


def slices_of(config: GPT2Config, place: Place) -> Mapping[str, Slice]:
    """Every tensor of which the rank holds something, by name."""
    rank, hidden, inner = place.tensor_rank, config.hidden, config.inner
    heads, mlp = place.tensor_share(config.heads), place.tensor_share(inner)
    attention = range(heads.start * config.head_size, heads.stop * config.head_size)
    qkv = tuple(range(part * hidden + attention.start, part * hidden + attention.stop) for part in range(3))
    vocabulary = (place.tensor_share(config.vocab_size),)
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
    for index in place.layers(config.layers):
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
