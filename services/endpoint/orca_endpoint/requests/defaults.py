"""Reads a model's generation_config.json: the sampling of requests of OpenAI's methods that say nothing."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orca.v1.orca_pb2 import Sampling
from orca_common.bounded_file import json_object, read_bounded, shown
from orca_common.checkpoint import CONFIG_BYTES, LARGEST
from orca_common.errors import FailedPrecondition
from orca_common.sampling import SAMPLING, Parameter

TEMPERATURE = 1.0  # OpenAI's default, for a file that does not say
READ = [parameter for parameter in SAMPLING.values() if parameter.by_model]


@dataclass(frozen=True)
class Defaults:
    """Sampling parameters by their names, and the tokens of an answer; None: the file does not say."""

    sampling: Mapping[str, float] = field(default_factory=lambda: {"temperature": TEMPERATURE})
    max_new_tokens: int | None = None

    def message(self) -> Sampling:
        """The parameters as a message."""
        given: dict[str, Any] = dict(self.sampling)
        return Sampling(**given)


FILE = "generation_config.json"
FOLLOWED = {"do_sample", "max_new_tokens", "eos_token_id"}
# What changes no token: how transformers computes, what it returns, and lengths, which a request gives here.
NO_TOKENS = {
    *(
        "_from_model_config",
        "transformers_version",
        "is_assistant",
        "max_time",
        "max_length",
        "min_length",
        "max_cache_len",
    ),
    *("bos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache", "cache_config", "cache_implementation"),
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
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "min_new_tokens", "penalty_alpha"), (0,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    "token_healing": (False,),
}

MODEL_SAYS_NOTHING = Defaults()


def read_defaults(folder: Path) -> Defaults:
    """Reads the file. Raises FailedPrecondition with the field's name for a value out of its limits.

    `do_sample: false` is greedy whatever the temperature. A top_k of 0 or -1 means all, as in transformers.
    """
    path = folder / FILE
    given = _given(path)
    found = {"temperature": TEMPERATURE}
    found |= {one.name: number_in(given, one, path) for one in READ if given.get(one.name) is not None}
    if found.get("top_k", 1) <= 0:
        del found["top_k"]
    if given.get("do_sample") is False:
        found["temperature"] = 0
    most = given.get("max_new_tokens")
    if most is not None and (type(most) is not int or not 1 <= most <= LARGEST):
        raise wrong(path, "max_new_tokens", most, f"between 1 and {LARGEST}")
    return Defaults(found, most)


def not_followed(folder: Path, model_type: str) -> dict[str, Any]:
    """The fields of the file that would change tokens in transformers and do nothing here, for the log."""
    followed = {one.name for one in READ} | FOLLOWED | ({"bad_words_ids"} if model_type == "marian" else set())
    return {
        name: value if isinstance(value, int | float | str) else shown(value)
        for name, value in _given(folder / FILE).items()
        if name not in followed | NO_TOKENS and value is not None and value not in NEUTRAL.get(name, ())
    }


def _given(path: Path) -> dict[str, Any]:
    with suppress(FileNotFoundError):
        return json_object(read_bounded(path, CONFIG_BYTES), path)
    return {}


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
