"""Gemma 3's config.json, without torch: windows and rotary positions alternate by layer, norms are on both sides."""

from collections.abc import Sequence

from orca_common.checkpoint import Checkpoint

from ..fields import MAX_LAYERS, MAX_WIDTH, Fields
from ..llama.configuration import FULL, SLIDING, LlamaConfig, kinds_of_layers
from ..rotary import LARGEST, LEAST_THETA, Rotary

# What other models of this type may have.
OTHERS = {
    "attn_logit_softcapping": "caps on scores of attention",
    "final_logit_softcapping": "a cap on logits",
    "use_bidirectional_attention": "attention in both directions",
}


def read(checkpoint: Checkpoint) -> LlamaConfig:
    """Fields that the file leaves out have Hugging Face's defaults. Raises FailedPrecondition with a sentence when the
    file asks for something that is not supported."""
    fields = Fields(checkpoint, "Gemma 3")
    for name, thing in OTHERS.items():
        fields.refuse_given(name, thing)
    hidden, layers = fields.whole("hidden_size", 2304), fields.whole("num_hidden_layers", 26, MAX_LAYERS)
    heads = fields.whole("num_attention_heads", 8)
    kv_heads = fields.kv_heads(heads, 4)
    head_size, bias = fields.whole("head_dim", 256), fields.flag("attention_bias", False)
    kinds, rotary = _kinds(fields, layers), _rotary(fields, head_size, checkpoint.max_positions)
    windows = {FULL: 0}
    if SLIDING in kinds:
        windows[SLIDING] = fields.whole("sliding_window", None if fields.has("sliding_window") else 4096, 1 << 30)
    return LlamaConfig(
        vocab_size=checkpoint.vocab_size,
        positions=checkpoint.max_positions,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        inner=fields.whole("intermediate_size", 9216, 4 * MAX_WIDTH),
        epsilon=fields.number("rms_norm_eps", 1e-6),
        activation=fields.activation("hidden_activation", "gelu_pytorch_tanh"),
        tied=fields.flag("tie_word_embeddings", True),
        rotary=tuple(rotary[kind] for kind in kinds),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=False,
        normed_heads=True,
        windows=tuple(windows[kind] for kind in kinds),
        score_scale=fields.number("query_pre_attn_scalar", 256, 1, MAX_WIDTH) ** -0.5,
        embedding_scale=hidden**0.5,
        norm_offset=1.0,
        norms_behind=True,
    )


def _kinds(fields: Fields, layers: int) -> Sequence[str]:
    """The kinds of the layers. Older files say of how many layers one has no window: the last."""
    if fields.get("layer_types") is not None:
        return kinds_of_layers(fields, layers)
    each = fields.whole("sliding_window_pattern", 6, MAX_LAYERS)
    return [SLIDING if (layer + 1) % each else FULL for layer in range(layers)]


def _rotary(fields: Fields, head_size: int, positions: int) -> dict[str, Rotary]:
    """The rotary positions of the layers of each kind. In older files a scaling holds for those without a window."""
    given = fields.part("rope_parameters")
    for name in ("rope_type", "rope_theta"):
        given.refuse_given(name, "the same rotary positions in all layers")
    parts = {FULL: given.part(FULL) if given.get(FULL) else fields.part("rope_scaling"), SLIDING: given.part(SLIDING)}
    thetas = {
        FULL: fields.number("rope_theta", 1e6, LEAST_THETA, LARGEST),
        SLIDING: fields.number("rope_local_base_freq", 1e4, LEAST_THETA, LARGEST),
    }
    return {kind: Rotary.read_part(parts[kind], head_size, positions, thetas[kind]) for kind in parts}
