"""The body of OpenAI's `POST /v1/completions`: the one list of its fields, and how requests are made of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orca.v1.orca_pb2 import GenerateRequest, TokenIds
from orca_common.errors import InvalidArgument
from orca_common.scores import MAX_TOP

from ...requests.defaults import MODEL_SAYS_NOTHING, Defaults
from ..body import get, text
from ..fields import BOOLEAN, IDS, METADATA, MODEL, OURS, SAMPLED, STOP, STORE, STREAM, STRING, USER, Field, Fixed
from ..forms import FIELDS as FORMS
from ..forms import form_of, loose_in
from ..request import (
    FIXED,
    UINT32,
    Asked,
    Sample,
    check_copies,
    generation,
    labels_of,
    read,
    request_of,
    token_ids,
    usage_in,
)
from ..response_format import RESPONSE_FORMAT

ADDED = Fixed(
    "add_special_tokens", (True,), "the tokenizer's special tokens are around each text; give token ids for others"
)
FIELDS = (
    MODEL,
    Field(
        "prompt",
        "supported",
        "Text, token ids, or a list of either. null is refused: a prompt is needed.",
        {"oneOf": [STRING, {"type": "array", "items": STRING}, IDS, {"type": "array", "items": IDS}]},
    ),
    Field(
        "best_of",
        "supported",
        "So many are generated for each prompt, and the `n` with the highest mean logprob are returned, the best "
        "first. At least `n`; more than `n` cannot be streamed. All of them are counted in `usage`.",
        {"type": "integer", "minimum": 1},
    ),
    Field("echo", "supported", "The prompt comes before each text, with `logprobs` its logprobs too.", BOOLEAN),
    Field(
        "logprobs",
        "supported",
        f"0 to {MAX_TOP} (OpenAI: 5): the logprob of each token, and as many of the most probable ones in "
        "`top_logprobs`.",
        {"type": "integer", "minimum": 0, "maximum": MAX_TOP},
    ),
    Field(
        "max_tokens",
        "supported",
        "16 when absent. 0 with `echo`: the prompt alone.",
        {"type": "integer", "minimum": 0, "default": 16},
    ),
    Field("n", "supported", "Choices for each prompt.", {"type": "integer", "minimum": 1, "default": 1}),
    STOP,
    *STREAM,
    Field("suffix", "refused", "No model here inserts text. An empty string is accepted.", {"const": ""}),
    USER,
    *SAMPLED,
    RESPONSE_FORMAT._replace(support="ours"),
    *FORMS,
    METADATA,
    STORE,
    ADDED.field("ours"),
    *OURS,
)
NAMES = frozenset(field.name for field in FIELDS)

DEFAULT_MAX_TOKENS = 16  # OpenAI's default
OF_CHATS = {"messages": "is a field of chats, at /v1/chat/completions; a completion has a prompt"}
FIXED_HERE = {"suffix": (("",), "no model here inserts text"), ADDED.name: (ADDED.values, ADDED.why), **FIXED}
# Our fields that have other names here. Those of `sampling` have the same without the prefix.
OUR_NAMES: Mapping[str, str] = {
    "text": "prompt",
    "token_ids.ids": "prompt",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "top_logprobs": "logprobs",
    "prompt_logprobs": "echo",  # with logprobs
}


Prompt = str | TokenIds


@dataclass
class Prompts:
    """The generations of a completion. The request of each is made when it is asked for: to make some thousand of them
    at once would hold up the loop."""

    common: GenerateRequest
    prompts: list[Prompt]
    each: int
    several: bool  # the field is a list of them
    names: Mapping[str, str]  # of fields

    def __len__(self) -> int:
        return len(self.prompts) * self.each

    def __iter__(self) -> Iterator[Sample]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, k: int, /) -> Sample:
        n, copy = divmod(k, self.each)
        request, prompt = generation(self.common, copy), self.prompts[n]
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.CopyFrom(prompt)
        field = f"prompt[{n}]" if self.several else "prompt"
        return Sample(request, {**OUR_NAMES, **self.names, "text": field, "token_ids.ids": field})

    def clear(self) -> None:
        """Releases the prompts."""
        self.prompts.clear()


@dataclass(frozen=True)
class Completion(Asked):
    """A parsed body. `each` is its best_of."""

    prompts: list[Prompt]
    n: int  # choices that are shown of each prompt
    logprobs: int | None  # most probable tokens that are wanted with each token; None: no logprobs at all
    echo: bool
    only_prompt: bool  # max_tokens is 0: the one token that every request makes is not shown


def parse(raw: bytes, max_samples: int, defaults: Defaults = MODEL_SAYS_NOTHING) -> Completion:
    """Raises InvalidArgument with the field's name.

    max_samples: generations of one body. defaults: of the model's sampling.
    """
    body = read(raw, NAMES, OF_CHATS, FIXED_HERE)
    stream = get(body, "stream", bool, "true or false", False)
    n, best_of = choices_of(body, stream)
    echo = get(body, "echo", bool, "true or false", False)
    logprobs = get(body, "logprobs", int, "an integer", None)
    if logprobs is not None and logprobs < 0:
        raise InvalidArgument("logprobs", f"must be at least 0; it is {logprobs}")
    max_tokens = get(body, "max_tokens", int, "an integer", DEFAULT_MAX_TOKENS)
    if max_tokens < (0 if echo else 1):
        raise InvalidArgument("max_tokens", f"must be at least 1, or 0 with echo; it is {max_tokens}")
    form = form_of(body)
    common = request_of(body, max(max_tokens, 1), defaults.sampling, form)
    if logprobs is not None or best_of > n:
        common.logprobs = True
    if logprobs is not None:
        common.top_logprobs, common.prompt_logprobs = min(logprobs, UINT32), echo
    prompts, several = prompts_of(body, common.ByteSize(), best_of, max_samples)
    return Completion(
        samples=Prompts(common, prompts, best_of, several, {} if form is None else {form.kind: form.field}),
        prompts=prompts,
        each=best_of,
        stream=stream,
        detaches=common.detach_grace.ToNanoseconds() > 0,
        usage_in=usage_in(body, stream),
        labels=labels_of(body),
        loose=loose_in(form),
        n=n,
        logprobs=logprobs,
        echo=echo,
        only_prompt=max_tokens == 0,
    )


def choices_of(body: Mapping[str, Any], stream: bool) -> tuple[int, int]:
    """n and best_of."""
    n = get(body, "n", int, "an integer", 1)
    if n < 1:
        raise InvalidArgument("n", f"must be at least 1; it is {n}")
    best_of = get(body, "best_of", int, "an integer", n)
    if best_of < n:
        raise InvalidArgument("best_of", f"is {best_of}; it must be at least n, which is {n}")
    if best_of > n and stream:
        raise InvalidArgument("best_of", "more than n cannot be streamed: the best are known at the end")
    return n, best_of


def prompts_of(body: Mapping[str, Any], common: int, best_of: int, limit: int) -> tuple[list[Prompt], bool]:
    """The prompts, and whether the field is a list of them: it is a string, or a list of strings, ids or lists of ids.

    common: bytes of each of their requests beside its prompt.
    """
    value = body.get("prompt")
    if value is None:
        raise InvalidArgument("prompt", "is missing")
    if isinstance(value, list) and not value:
        raise InvalidArgument("prompt", "the prompt is empty")
    several = isinstance(value, list) and isinstance(value[0], str | list)
    items = value if several else [value]
    if len(items) * best_of > limit:
        if best_of == 1:
            raise InvalidArgument(
                "prompt", f"has {len(items)} prompts; at most {limit} are allowed (the server's max_prompts)"
            )
        each = f" for each of {len(items)} prompts" if len(items) > 1 else ""
        problem = f"{best_of}{each} are too many; at most {limit} are allowed together (the server's max_prompts)"
        raise InvalidArgument("best_of" if "best_of" in body else "n", problem)
    prompts, size = list[Prompt](), 0
    for n, item in enumerate(items):
        field = f"prompt[{n}]" if several else "prompt"
        if isinstance(item, str):
            prompts.append(text(item, field))
            bytes_of = len(item.encode())
        elif isinstance(item, list):
            prompts.append(ids := TokenIds(ids=token_ids(item, field)))
            bytes_of = ids.ByteSize()
        else:
            one = "must be a string or a list of token ids"
            raise InvalidArgument(
                field, one if several else "must be a string, a list of token ids, or a list of either"
            )
        size += best_of * (common + bytes_of)
        check_copies(size, "prompt")
    return prompts, several
