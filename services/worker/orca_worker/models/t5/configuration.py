"""T5's config.json, without torch."""

from dataclasses import dataclass

from orca_common.bounded_file import shown
from orca_common.checkpoint import Checkpoint

from ..fields import ACTIVATIONS, MAX_LAYERS, MAX_WIDTH, Fields

MAX_REACH = 1 << 16


@dataclass(frozen=True)
class T5Config:
    """config.json. Fields that the file leaves out have Hugging Face's defaults."""

    vocab_size: int
    positions: int
    hidden: int
    encoder_layers: int
    layers: int  # of the decoder
    heads: int
    head_size: int
    inner: int
    epsilon: float
    activation: str
    gated: bool
    tied: bool  # a head of its own is found in the files alone
    scaled_output: bool
    buckets: int
    reach: int
    start_token: int

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "T5Config":
        """Raises FailedPrecondition with a sentence when the file asks for something that is not supported."""
        fields = Fields(checkpoint, "T5")
        layers = fields.whole("num_layers", 6, MAX_LAYERS)
        kind = fields.get("feed_forward_proj", "relu")
        gated = isinstance(kind, str) and kind.startswith("gated-")
        name = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-") if gated else kind
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise fields.refuse(f"asks for feed_forward_proj {shown(kind)}; T5 here has {', '.join(ACTIVATIONS)}")
        buckets = fields.whole("relative_attention_num_buckets", 32)
        reach = fields.whole("relative_attention_max_distance", 128, MAX_REACH)
        if buckets < 4 or buckets % 2 or reach <= buckets // 2:
            raise fields.refuse(
                f"has {buckets} buckets of distances up to {reach}: an even number from 4 to {2 * reach}"
            )
        return cls(
            vocab_size=checkpoint.vocab_size,
            positions=checkpoint.max_positions,
            hidden=fields.whole("d_model", 512),
            encoder_layers=layers,
            layers=fields.whole("num_decoder_layers", layers, MAX_LAYERS),
            heads=fields.whole("num_heads", 8),
            head_size=fields.whole("d_kv", 64),
            inner=fields.whole("d_ff", 2048, 4 * MAX_WIDTH),
            epsilon=fields.number("layer_norm_epsilon", 1e-6),
            activation=ACTIVATIONS[name],
            gated=gated,
            tied=True,
            scaled_output=fields.flag("scale_decoder_outputs", fields.flag("tie_word_embeddings", True)),
            buckets=buckets,
            reach=reach,
            start_token=checkpoint.start_token or 0,
        )
