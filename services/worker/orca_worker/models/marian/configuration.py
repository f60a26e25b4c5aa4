"""Marian's config.json, without torch."""

from dataclasses import dataclass

from orca_common.bounded_file import shown
from orca_common.checkpoint import Checkpoint, generation_fields

from ..fields import MAX_LAYERS, MAX_WIDTH, Fields

# What some toolkits' models of this kind have, and Marian's do not.
OTHERS = {
    "normalize_before": "norms before each part",
    "normalize_embedding": "a norm of the embedding",
    "add_final_layer_norm": "a norm behind the last layer",
}


@dataclass(frozen=True)
class MarianConfig:
    """config.json. Fields that the file leaves out have Hugging Face's defaults."""

    vocab_size: int
    positions: int
    hidden: int
    encoder_layers: int
    layers: int  # of the decoder
    heads: int
    encoder_inner: int
    inner: int  # of the decoder's layers
    activation: str
    tied: bool  # a head of its own is found in the files alone
    scale_embedding: bool
    start_token: int
    never_made: tuple[int, ...]  # tokens

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "MarianConfig":
        """Raises FailedPrecondition with a sentence when the file asks for something that is not supported."""
        fields = Fields(checkpoint, "Marian")
        for name, thing in OTHERS.items():
            fields.refuse_given(name, thing)
        hidden = fields.whole("d_model", 1024)
        heads, of_encoder = (fields.whole(f"{part}_attention_heads", 16) for part in ("decoder", "encoder"))
        if heads != of_encoder:
            problem = f"has decoder_attention_heads {heads} and encoder_attention_heads {of_encoder}"
            raise fields.refuse(f"{problem}; both must be one number, because they share memory")
        fields.head_size(hidden, heads)
        if (vocabulary := fields.whole("decoder_vocab_size", checkpoint.vocab_size, 1 << 24)) != checkpoint.vocab_size:
            raise fields.refuse(
                f"has vocabularies of {checkpoint.vocab_size} and {vocabulary} tokens; one is supported"
            )
        for name in ("tie_word_embeddings", "share_encoder_decoder_embeddings"):
            if not fields.flag(name, True):
                raise fields.lacks(f"several tables of tokens ({name} is false)")
        return cls(
            vocab_size=checkpoint.vocab_size,
            positions=checkpoint.max_positions,
            hidden=hidden,
            encoder_layers=fields.whole("encoder_layers", 12, MAX_LAYERS),
            layers=fields.whole("decoder_layers", 12, MAX_LAYERS),
            heads=heads,
            encoder_inner=fields.whole("encoder_ffn_dim", 4096, 4 * MAX_WIDTH),
            inner=fields.whole("decoder_ffn_dim", 4096, 4 * MAX_WIDTH),
            activation=fields.activation("activation_function", "gelu"),
            tied=True,
            scale_embedding=fields.flag("scale_embedding", False),
            start_token=checkpoint.start_token or 0,
            never_made=_never_made(fields, checkpoint),
        )


def _never_made(fields: Fields, checkpoint: Checkpoint) -> tuple[int, ...]:
    """`bad_words_ids`: published models forbid their padding so."""
    _, said = generation_fields(checkpoint.folder)
    given = said.get("bad_words_ids")
    words = [] if given is None else given
    if isinstance(words, list) and all(isinstance(word, list) and len(word) == 1 for word in words):
        tokens = tuple(word[0] for word in words)
        if all(type(token) is int and 0 <= token < checkpoint.vocab_size for token in tokens):
            return tokens
    raise fields.refuse(f"gives bad_words_ids {shown(given)}, not lists of one token each")
