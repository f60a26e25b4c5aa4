"""The fields of Anthropic's `POST /v1/messages`, and which of them Orca honours: the one list of them."""

from ..openai.chat.fields import TEMPLATE_KWARGS
from ..openai.fields import BOOLEAN, FUNCTION_NAME, MODEL, OURS, SAMPLED, STRING, Field, Fixed, closed

REFUSED = (
    Fixed("container", (), "no code runs here"),
    Fixed("diagnostics", (), "usage alone says what was cached"),
    Fixed("inference_geo", (), "a release is where it is"),
    Fixed("service_tier", ("auto", "standard_only"), "`priority` says who goes first"),
    Fixed("speed", ("standard",), "there is one speed"),
    Fixed(
        "thinking",
        ({"type": "disabled"},),
        "`disabled` sets `enable_thinking: false` for the chat template; other variables go in `chat_template_kwargs`",
    ),
    Fixed("user_profile_id", (), "no profiles are kept"),
    Fixed("workspace_id", (), "there is one workspace, which is the tenant's"),
)
FIXED = {one.name: (one.values, one.why) for one in REFUSED}
TEXT = closed(["type", "text"], type={"const": "text"}, text=STRING)
BLOCK = {"type": "object", "required": ["type"], "properties": {"type": STRING}}
MESSAGE = closed(
    ["role", "content"],
    role={"enum": ["user", "assistant", "system"]},
    content={"oneOf": [STRING, {"type": "array", "items": BLOCK}]},
)
TOOL = closed(
    ["name", "input_schema"],
    type={"const": "custom"},
    name=FUNCTION_NAME,
    description=STRING,
    input_schema={"type": "object"},
    strict=BOOLEAN,
)
CHOICE = closed(
    ["type"], type={"enum": ["auto", "any", "tool", "none"]}, name=STRING, disable_parallel_tool_use=BOOLEAN
)

# Fields of a prompt, which `count_tokens` has, too.
OF_PROMPTS = (
    MODEL,
    Field(
        "messages",
        "supported",
        "The model's chat template makes the prompt of them. Roles: user, assistant, system. `content` is a text or a "
        "list of blocks: `text`, `tool_use` of an assistant, `tool_result` of a user; texts are joined by line breaks. "
        "[Blocks of answers may be given back](#blocks) as they came. Images and documents are refused, and so is an "
        "assistant's message at the end: no answer goes on from a beginning.",
        {"type": "array", "items": MESSAGE, "minItems": 1},
    ),
    Field(
        "system",
        "supported",
        "A text or a list of blocks of type text: a system's message before all others.",
        {"oneOf": [STRING, {"type": "array", "items": TEXT}]},
    ),
    Field(
        "tools",
        "supported",
        "Functions that the answer may call, as for [a chat](#tools); their `input_schema` is what `parameters` is "
        "there. Tools that run at the server are refused.",
        {"type": "array", "maxItems": 128, "items": TOOL},
    ),
    Field(
        "tool_choice",
        "supported",
        "`auto` (the default), `none`, `any`: calls, or `tool`: one call of the one by its name. "
        "`disable_parallel_tool_use`: one call at most.",
        CHOICE,
    ),
    Field("cache_control", "supported", "Changes nothing: a hint for caches of prompts.", {"type": "object"}),
    TEMPLATE_KWARGS,
)
FIELDS = (
    *OF_PROMPTS,
    Field("max_tokens", "supported", "Needed, as with Anthropic.", {"type": "integer", "minimum": 1}),
    Field("metadata", "supported", "`user_id` goes to the request's span as `orca.user`.", closed([], user_id=STRING)),
    Field(
        "output_config",
        "supported",
        "`format` is a `json_schema` that the text follows. A keyword that cannot be enforced is refused. `effort` "
        "must be null.",
        closed(
            [],
            format=closed(["type", "schema"], type={"const": "json_schema"}, schema={"type": "object"}),
        ),
    ),
    Field(
        "stop_sequences",
        "supported",
        "Up to 16 texts. They are not part of the answer, which says which one has ended it.",
        {"type": "array", "items": STRING},
    ),
    Field("stream", "supported", "Server-sent events with their names.", BOOLEAN),
    *(one.field() for one in REFUSED),
    *(one._replace(support="ours") for one in SAMPLED),
    *OURS,
)
NAMES = frozenset(field.name for field in FIELDS)
