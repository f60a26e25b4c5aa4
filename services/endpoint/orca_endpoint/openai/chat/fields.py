"""The fields of OpenAI's `POST /v1/chat/completions`, and which of them Orca honours: the one list of them."""

from orca_common.scores import MAX_TOP

from ..fields import (
    BOOLEAN,
    CACHES,
    METADATA,
    MODEL,
    ONE_TIER,
    OURS,
    SAMPLED,
    SERVICE_TIER,
    STOP,
    STREAM,
    STRING,
    USER,
    Field,
    Fixed,
    closed,
)
from ..forms import FIELDS as FORMS
from ..response_format import RESPONSE_FORMAT
from .tools import CALL
from .tools import FIELDS as TOOLS

REFUSED = (
    Fixed("audio", (), "no model here speaks"),
    Fixed("function_call", ("none",), "it is the older name of `tool_choice`"),
    Fixed("functions", ([],), "it is the older name of `tools`"),
    Fixed("modalities", (["text"],), "answers are text alone"),
    Fixed("moderation", (), "nothing is moderated here"),
    Fixed("prediction", (), "no predicted output is used"),
    *CACHES,
    Fixed(
        "reasoning_effort",
        ("none",),
        "`none` sets `enable_thinking: false` for the chat template; other variables go in `chat_template_kwargs`",
    ),
    Fixed("store", (False,), "nothing is stored"),
    Fixed("verbosity", (), "no model here has it"),
    Fixed("web_search_options", (), "nothing is searched"),
)
TEMPLATED = Fixed("add_special_tokens", (False,), "the template puts special tokens where they belong")
FIXED = {one.name: (one.values, one.why) for one in (*REFUSED, TEMPLATED)} | ONE_TIER

PART = closed(["type", "text"], type={"const": "text"}, text=STRING)
MESSAGE = closed(
    ["role"],
    role={"enum": ["system", "developer", "user", "assistant", "tool"]},
    content={"oneOf": [STRING, {"type": "array", "items": PART}, {"type": "null"}]},
    name=STRING,
    tool_call_id=STRING,
    tool_calls={"type": "array", "items": CALL},
)
COUNT = {"type": "integer", "minimum": 1}
SAFETY = Field("safety_identifier", "supported", "Goes to the request's span as `orca.safety_identifier`.", STRING)
PROMPT_CACHE_KEY = Field(
    "prompt_cache_key", "supported", "Changes nothing: prompts are cached by what they hold, or not at all.", STRING
)
LOGPROBS = (
    Field("logprobs", "supported", "The logprob of each token.", BOOLEAN),
    Field(
        "top_logprobs",
        "supported",
        f"Only with `logprobs`. 0 to {MAX_TOP}: as many of the most probable tokens at each place.",
        {"type": "integer", "minimum": 0, "maximum": MAX_TOP},
    ),
)
TEMPLATE_KWARGS = Field(
    "chat_template_kwargs",
    "ours",
    "Variables for the chat template, as `enable_thinking`. The template itself is the model's: `chat_template` is "
    "refused, here and in the body.",
    {"type": "object"},
)

FIELDS = (
    MODEL,
    Field(
        "messages",
        "supported",
        "The model's chat template makes the prompt of them. Roles: system, developer (as system where the template "
        "does not name it), user, assistant, tool. `content` is a text or a list of parts of type text, which are "
        "joined by line breaks. `name`, `tool_call_id` of a tool and `tool_calls` of the assistant reach the template. "
        "[Answers may be given back](#conversations) as they came. Images, audio and files are refused.",
        {"type": "array", "items": MESSAGE, "minItems": 1},
    ),
    Field(
        "max_completion_tokens",
        "supported",
        "Absent: `max_new_tokens` of the model's `generation_config.json`, or the setting `chat_tokens`, or the rest "
        "of the context; less where the model or the engines have no room for it.",
        COUNT,
    ),
    Field("max_tokens", "supported", "The older name of `max_completion_tokens`.", COUNT),
    *LOGPROBS,
    Field("n", "supported", "Choices.", COUNT | {"default": 1}),
    RESPONSE_FORMAT,
    *TOOLS,
    STOP,
    *STREAM,
    USER,
    SAFETY,
    METADATA._replace(support="supported"),
    *SAMPLED,
    *(one.field() for one in REFUSED),
    SERVICE_TIER,
    PROMPT_CACHE_KEY,
    TEMPLATE_KWARGS,
    *FORMS,
    TEMPLATED.field("ours"),
    *OURS,
)
NAMES = frozenset(field.name for field in FIELDS)
