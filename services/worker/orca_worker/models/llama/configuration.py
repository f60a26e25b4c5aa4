"""The config.json of models in Llama's shape, without torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from orca_common.bounded_file import shown
from orca_common.checkpoint import Checkpoint

from ..fields import MAX_LAYERS, MAX_WIDTH, Fields
from ..rotary import Rotary

# By model_type, where these differ: the name in sentences; q, k and v with a bias though no field says so; heads with
# norms of their own; a window in all layers, or where `use_sliding_window` and `max_window_layers` say so.
NAMES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen 2", "qwen3": "Qwen 3"}
BIASED = ("qwen2",)
HEADS_NORMED = ("qwen3",)
SLIDING, FULL = "sliding_attention", "full_attention"  # of `layer_types`
INNER = {"llama": 11008, "mistral": 14336, "qwen2": 22016, "qwen3": 22016}  # where the file does not say
KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
WINDOWS = {"mistral": "everywhere", "qwen2": "upper layers", "qwen3": "upper layers"}


@dataclass(frozen=True)
class LlamaConfig:
    """config.json. Fields that the file leaves out have Hugging Face's defaults."""

    vocab_size: int
    positions: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    epsilon: float
    activation: str
    tied: bool
    rotary: tuple[Rotary, ...]  # of each layer
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    normed_heads: bool
    windows: tuple[int, ...]  # of each layer: keys that a query sees at most; 0: all
    score_scale: float
    embedding_scale: float = 1.0
    norm_offset: float = 0.0  # what norms' weights lack
    norms_behind: bool = False  # attention and the feed-forward network have a norm behind them too

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "LlamaConfig":
        """Raises FailedPrecondition with a sentence when the file asks for something that is not supported."""
        kind = checkpoint.model_type
        fields = Fields(checkpoint, NAMES[kind])
        hidden, heads = fields.whole("hidden_size", 4096), fields.whole("num_attention_heads", 32)
        kv_heads = fields.kv_heads(heads, KV_HEADS.get(kind, heads))
        if fields.get("head_dim") is None and kind != "qwen3":
            head_size = fields.head_size(hidden, heads)
        else:
            head_size = fields.whole("head_dim", 128)
        layers = fields.whole("num_hidden_layers", 32, MAX_LAYERS)
        bias = fields.flag("attention_bias", False)
        return cls(
            vocab_size=checkpoint.vocab_size,
            positions=checkpoint.max_positions,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            inner=fields.whole("intermediate_size", INNER[kind], 4 * MAX_WIDTH),
            epsilon=fields.number("rms_norm_eps", 1e-6),
            activation=fields.activation("hidden_act", "silu"),
            tied=fields.flag("tie_word_embeddings", False),
            rotary=(Rotary.read(fields, head_size, checkpoint.max_positions),) * layers,
            qkv_bias=bias or kind in BIASED,
            out_bias=bias,
            mlp_bias=fields.flag("mlp_bias", False),
            normed_heads=kind in HEADS_NORMED,
            windows=_windows(fields, kind, layers),
            score_scale=head_size**-0.5,
        )


def _windows(fields: Fields, kind: str, layers: int) -> tuple[int, ...]:
    """The window of each layer. `layer_types` says where it holds, if it is there."""
    where = WINDOWS.get(kind)
    default = None if fields.has("sliding_window") else 4096
    if where is None or (where == "upper layers" and not fields.flag("use_sliding_window", False)):
        return (0,) * layers
    if fields.get("sliding_window", default) is None:
        return (0,) * layers
    window = fields.whole("sliding_window", default, 1 << 30)
    if where == "everywhere":
        return (window,) * layers
    if fields.get("layer_types") is None:
        first = fields.whole("max_window_layers", 28, MAX_LAYERS) if fields.get("max_window_layers") != 0 else 0
        return tuple(window if i >= first else 0 for i in range(layers))
    return tuple(window if kind == SLIDING else 0 for kind in kinds_of_layers(fields, layers))


def kinds_of_layers(fields: Fields, layers: int) -> Sequence[str]:
    """`layer_types`: SLIDING or FULL of each layer."""
    kinds = fields.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or any(each not in (SLIDING, FULL) for each in kinds):
        raise fields.refuse(f"gives layer_types {shown(kinds)}, not {SLIDING} or {FULL} of each layer")
    return kinds
