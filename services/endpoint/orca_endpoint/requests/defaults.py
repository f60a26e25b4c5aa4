"""Reads how a model is to generate: the sampling of requests of OpenAI's methods that say nothing, and a forced end."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orca.v1.orca_pb2 import Sampling
from orca_common.bounded_file import shown
from orca_common.checkpoint import LARGEST, generation_fields
from orca_common.errors import FailedPrecondition
from orca_common.sampling import SAMPLING, Parameter

TEMPERATURE = 1.0  # OpenAI's default, for a file that does not say
READ = [parameter for parameter in SAMPLING.values() if parameter.by_model]


@dataclass(frozen=True)
class Defaults:
    """Sampling parameters by their names, the tokens of an answer, and the token with which the longest answer ends
    (`forced_eos_token_id`), by any method; None: the file does not say."""

    sampling: Mapping[str, float] = field(default_factory=lambda: {"temperature": TEMPERATURE})
    max_new_tokens: int | None = None
    forced_end: int | None = None

    def message(self) -> Sampling:
        """The parameters as a message."""
        given: dict[str, Any] = dict(self.sampling)
        return Sampling(**given)


FOLLOWED = {"do_sample", "max_new_tokens", "eos_token_id", "forced_eos_token_id", "decoder_start_token_id"}
# What changes no token: how transformers computes, what it returns, and lengths, which a request gives here.
NO_TOKENS = {
    *(
        "_from_model_config",
        "transformers_version",
        "is_assistant",
        "max_time",
        "max_length",
        "max_cache_len",
    ),
    *("bos_token_id", "pad_token_id", "use_cache", "cache_config", "cache_implementation"),
    *("compile_config", "disable_compile", "continuous_batching_config", "prefill_chunk_size", "low_memory", "use_mtp"),
    *("output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate"),
    *("num_return_sequences", "early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty"),  # of beams
    *("assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
    *("speculation_type", "target_lookbehind", "remove_invalid_values", "renormalize_logits"),
}
# Values of other fields with which they change nothing either.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "typical_p": (1.0,),
    "guidance_scale": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "min_length", "min_new_tokens", "penalty_alpha"), (0,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    "token_healing": (False,),
}
# What has no such value. A config.json has fields of other kinds, too.
UNKNOWN_HERE = {
    *("bad_words_ids", "begin_suppress_tokens", "constraints", "dola_layers", "exponential_decay_length_penalty"),
    *("force_words_ids", "forced_bos_token_id", "sequence_bias", "stop_strings", "suppress_tokens", "top_h"),
    "watermarking_config",
}

MODEL_SAYS_NOTHING = Defaults()


def read_defaults(folder: Path, vocab_size: int) -> Defaults:
    """Reads the file. Raises FailedPrecondition with the field's name for a value out of its limits.

    `do_sample: false` is greedy whatever the temperature. A top_k of 0 or -1 means all, as in transformers.
    """
    path, given = generation_fields(folder)
    found = {"temperature": TEMPERATURE}
    found |= {one.name: number_in(given, one, path) for one in READ if given.get(one.name) is not None}
    if found.get("top_k", 1) <= 0:
        del found["top_k"]
    if given.get("do_sample") is False:
        found["temperature"] = 0
    most = given.get("max_new_tokens")
    if most is not None and (type(most) is not int or not 1 <= most <= LARGEST):
        raise wrong(path, "max_new_tokens", most, f"between 1 and {LARGEST}")
    return Defaults(found, most, _forced_end(given, vocab_size, path))


def _forced_end(given: Mapping[str, Any], vocab_size: int, path: Path) -> int | None:
    """The token that a forced end takes: of several the first of the vocabulary, as in transformers' greedy search."""
    value = given.get("forced_eos_token_id")
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int or not 0 <= token < vocab_size for token in tokens):
        raise wrong(path, "forced_eos_token_id", value, f"tokens of a vocabulary of {vocab_size}")
    return min(tokens, default=None)


def not_followed(folder: Path, model_type: str) -> dict[str, Any]:
    """The fields of the file that would change tokens in transformers and do nothing here, for the log."""
    path, given = generation_fields(folder)
    followed = {one.name for one in READ} | FOLLOWED | ({"bad_words_ids"} if model_type == "marian" else set())
    return {
        name: value if isinstance(value, int | float | str) else shown(value)
        for name, value in given.items()
        if name not in followed | NO_TOKENS and value is not None and value not in NEUTRAL.get(name, ())
        if path.name != "config.json" or name in UNKNOWN_HERE | NEUTRAL.keys()
    }


def number_in(given: Mapping[str, Any], parameter: Parameter, path: Path) -> float:
    """The value of a field, which is there."""
    value, counted = given[parameter.name], parameter.kind == "count"
    if isinstance(value, bool) or not isinstance(value, int if counted else int | float):
        raise wrong(path, parameter.name, value, "a whole number" if counted else "a number")
    if counted and -1 <= value <= 0:
        return value
    if not parameter.limits.holds(value) or value > LARGEST:
        raise wrong(path, parameter.name, value, str(parameter.limits))
    return value


def wrong(path: Path, name: str, value: object, must: str) -> FailedPrecondition:
    return FailedPrecondition(f"model: {path}: {name} is {shown(value)}; it must be {must}")
