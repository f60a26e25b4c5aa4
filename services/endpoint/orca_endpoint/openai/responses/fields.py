"""The fields of OpenAI's `POST /v1/responses`, and which of them Orca honours: the one list of them."""

from orca_common.scores import MAX_TOP

from ..chat.fields import PROMPT_CACHE_KEY, SAFETY, TEMPLATE_KWARGS
from ..fields import (
    BOOLEAN,
    CACHES,
    FUNCTION_NAME,
    METADATA,
    MODEL,
    ONE_TIER,
    OURS,
    SAMPLED,
    SERVICE_TIER,
    STOP,
    STRING,
    USER,
    Field,
    Fixed,
    closed,
)

REFUSED = (
    Fixed("access_programs", (), "no program has access here"),
    Fixed("background", (False,), "a response needs its connection; `detach_grace` lets it live on without"),
    Fixed("background_options", (), "a response needs its connection"),
    Fixed("context_management", (), "a conversation is taken as it is"),
    Fixed("conversation", (), "conversations are not kept; `previous_response_id` goes on from a response"),
    Fixed("image", (), "no model here makes images"),
    Fixed("max_tool_calls", (), "it bounds tools that run at the server, and none do here"),
    Fixed("moderation", (), "nothing is moderated here"),
    Fixed("prompt", (), "no templates of prompts are kept"),
    *CACHES,
    Fixed("truncation", ("disabled",), "a conversation that does not fit is refused"),
)
FIXED = {one.name: (one.values, one.why) for one in REFUSED} | ONE_TIER
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (  # what OpenAI can include; all but LOGPROBS are parts of items that no answer here has
    LOGPROBS,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
FUNCTION = closed(
    ["type", "name"],
    type={"const": "function"},
    name=FUNCTION_NAME,
    description=STRING,
    parameters={"type": "object"},
    strict=BOOLEAN,
)
NAMED = closed(["type", "name"], type={"const": "function"}, name=STRING)
ALLOWED = closed(
    ["type", "mode", "tools"],
    type={"const": "allowed_tools"},
    mode={"enum": ["auto", "required"]},
    tools={"type": "array", "items": NAMED, "minItems": 1},
)
FORMAT = {
    "oneOf": [
        {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}, "additionalProperties": False},
        closed(
            ["type", "name", "schema"],
            type={"const": "json_schema"},
            name=STRING,
            schema={"type": "object"},
            strict=BOOLEAN,
            description=STRING,
        ),
    ]
}
ITEM = {"type": "object", "properties": {"type": STRING, "content": {"oneOf": [STRING, {"type": "array"}]}}}

FIELDS = (
    MODEL,
    Field(
        "input",
        "supported",
        "A text, which is a user's message, or a list of items: messages (roles: user, assistant, system, developer; "
        "`content` is a text or a list of parts of type input_text or output_text), `function_call`, "
        "`function_call_output`, and `item_reference` to an item of a response that is [kept](#kept-responses), up to "
        "128 responses. "
        "[Items of answers may be given back](#items) as they came. Images, audio and files are refused.",
        {"oneOf": [STRING, {"type": "array", "items": ITEM, "minItems": 1}]},
    ),
    Field("instructions", "supported", "A system's message before all others, for this response alone.", STRING),
    Field(
        "previous_response_id",
        "supported",
        "The conversation goes on from this response, as long as it is [kept](#kept-responses).",
        STRING,
    ),
    Field(
        "store",
        "supported",
        "false: the response cannot be read again, taken up or gone on from. Absent or true: it is "
        "[kept](#kept-responses) as long as its request, by default 300 s after its end.",
        BOOLEAN,
    ),
    Field(
        "max_output_tokens",
        "supported",
        "Absent: as `max_completion_tokens` of [a chat](#fields-of-a-chat).",
        {"type": "integer", "minimum": 1},
    ),
    Field(
        "text",
        "supported",
        "`format` is `text`, `json_object`, or `json_schema` with a schema that the text follows. A keyword that "
        "cannot be enforced is refused with `strict`, and [left out](#schemas) without it. Not with `ignore_eos`. "
        "`verbosity` may be medium.",
        closed([], format=FORMAT, verbosity={"const": "medium"}),
    ),
    Field(
        "tools",
        "supported",
        "Functions that the answer may call, as for [a chat](#tools). A tool that runs at the server, as a search, is "
        "refused.",
        {"type": "array", "maxItems": 128, "items": FUNCTION},
    ),
    Field(
        "tool_choice",
        "supported",
        "`auto` (the default), `none`, `required`, a function by its name, or `allowed_tools`, as for a chat.",
        {"oneOf": [{"enum": ["none", "auto", "required"]}, NAMED, ALLOWED]},
    ),
    Field("parallel_tool_calls", "supported", "false: one call at most. Some models make one at most anyway.", BOOLEAN),
    Field(
        "include",
        "supported",
        f"`{LOGPROBS}`: the logprob of each token of a text. The other values of OpenAI's change nothing: no answer "
        "here has such items.",
        {"type": "array", "items": {"enum": [*INCLUDABLE]}},
    ),
    Field(
        "top_logprobs",
        "supported",
        f'Above 0 only with `include: ["{LOGPROBS}"]`. 0 to {MAX_TOP}: as many of the most probable tokens at each '
        "place.",
        {"type": "integer", "minimum": 0, "maximum": MAX_TOP},
    ),
    Field(
        "reasoning",
        "supported",
        "`effort` may be `none`, which sets `enable_thinking: false` for the chat template; the other members must be "
        "null. Other variables of a template go in `chat_template_kwargs`.",
        closed([], effort={"const": "none"}),
    ),
    Field("stream", "supported", "Server-sent [events](#events-of-a-response) with their names.", BOOLEAN),
    Field(
        "stream_options",
        "supported",
        "Only with `stream`. `include_obfuscation` must be false.",
        closed([], include_obfuscation={"const": False}),
    ),
    USER,
    SAFETY,
    METADATA._replace(support="supported"),
    *(one._replace(support="supported" if one.name in {"temperature", "top_p"} else "ours") for one in SAMPLED),
    *(one.field() for one in REFUSED),
    SERVICE_TIER,
    PROMPT_CACHE_KEY,
    TEMPLATE_KWARGS,
    STOP._replace(support="ours", how="Up to 16 strings. They are not part of the text."),
    *OURS,
)
NAMES = frozenset(field.name for field in FIELDS)
