"""What a request asks for beyond the plain draw: checked, and as the message that goes to the rank that samples."""

from collections.abc import Callable

from orca.v1.adjustments_pb2 import Adjustments
from orca.v1.orca_pb2 import GenerateRequest, Sampling
from orca_common.errors import InvalidArgument
from orca_common.scores import MAX_TOP

MAX_PENALTY = 2.0  # of presence and frequency, both signs
MAX_REPETITION = 100.0
MAX_BIAS = 100.0  # both signs
MAX_BIASES = 1024

Error = Callable[[str, str], InvalidArgument]  # of a field and what is wrong with it


def adjustments_of(request: GenerateRequest, vocab_size: int, error: Error) -> Adjustments | None:
    """None for a plain request. Raises InvalidArgument.

    What changes nothing is left out, so that it costs nothing: neutral values, and a greedy request's min_p.
    """
    sampling = request.sampling
    if not 0 <= sampling.min_p <= 1:  # NaN is not between them either
        raise error("sampling.min_p", f"must be between 0 and 1; it is {sampling.min_p}")
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampling, name)
        if not -MAX_PENALTY <= value <= MAX_PENALTY:
            raise error(f"sampling.{name}", f"must be between -{MAX_PENALTY:g} and {MAX_PENALTY:g}; it is {value}")
    repetition = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
    if not 0 < repetition <= MAX_REPETITION:
        problem = f"must be above 0 and at most {MAX_REPETITION:g}; it is {repetition}"
        raise error("sampling.repetition_penalty", problem)
    _check_biases(sampling, vocab_size, error)
    if request.top_logprobs > MAX_TOP:
        raise error("top_logprobs", f"is {request.top_logprobs}; at most {MAX_TOP} are allowed")
    asked = Adjustments(
        min_p=sampling.min_p if sampling.temperature else 0.0,
        repetition_penalty=0.0 if repetition == 1 else repetition,
        presence_penalty=sampling.presence_penalty or 0.0,  # -0.0 is 0
        frequency_penalty=sampling.frequency_penalty or 0.0,
        logit_bias={i: bias for i, bias in sampling.logit_bias.items() if bias},
        top_logprobs=min(request.top_logprobs, vocab_size),
        prompt_logprobs=request.prompt_logprobs,
    )
    return asked if asked.ByteSize() else None


def _check_biases(sampling: Sampling, vocab_size: int, error: Error) -> None:
    biases = sampling.logit_bias
    if len(biases) > MAX_BIASES:
        raise error("sampling.logit_bias", f"has {len(biases)} entries; at most {MAX_BIASES} are allowed")
    for token_id in sorted(biases):
        field, bias = f"sampling.logit_bias[{token_id}]", biases[token_id]
        if token_id >= vocab_size:
            raise error(field, f"is no token: the vocabulary has {vocab_size}")
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise error(field, f"must be between -{MAX_BIAS:g} and {MAX_BIAS:g}; it is {bias}")
