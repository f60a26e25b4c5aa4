"""The fields of Ollama's `POST /api/chat` and `POST /api/generate`, and their options: the one list of them."""

from collections.abc import Mapping

from ..openai.chat.fields import LOGPROBS, TEMPLATE_KWARGS
from ..openai.chat.tools import FUNCTION, IS_FUNCTION
from ..openai.fields import BOOLEAN, INTEGER, MODEL, NUMBER, OURS, SAMPLED, STRING, STRINGS, Field, Fixed, closed

LOAD = "how a model is loaded is the operator's choice"
# Options that are taken and change nothing, and why.
IGNORED: Mapping[str, str] = {
    "num_ctx": "a request has the context that it needs, up to the model's",
    "num_keep": "a prompt that is too long is refused, never cut",
    **dict.fromkeys(("mirostat_tau", "mirostat_eta"), "`mirostat` is off"),
    **dict.fromkeys(("numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all"), LOAD),
    **dict.fromkeys(("use_mmap", "use_mlock", "num_thread"), LOAD),
}
FIXED_OPTIONS = (
    Fixed("mirostat", (0,), "no such way to draw is here"),
    Fixed("tfs_z", (1, 1.0), "no such way to draw is here"),
    Fixed("typical_p", (1, 1.0), "no such way to draw is here"),
    Fixed("repeat_last_n", (-1,), "`repeat_penalty` looks at the whole prompt and answer"),
    Fixed("penalize_newline", (True,), "a line break is a token as others"),
    Fixed("vocab_only", (False,), LOAD),
    Fixed("embedding_only", (False,), LOAD),
)
RENAMED = {"repetition_penalty": "repeat_penalty"}  # of our sampling parameters
NOTES = {"top_k": "0: all.", "seed": "-1: each time another."}  # where an option has a value that ours has not
OPTIONS = (
    Field("num_predict", "supported", "Tokens of an answer at most. Absent, -1 or -2: all that fit.", INTEGER),
    Field("stop", "supported", "Up to 16 strings. They are not part of the text.", STRINGS),
    *(
        field._replace(
            name=RENAMED.get(field.name, field.name),
            support="ours" if field.name == "logit_bias" else "supported",
            how=" ".join([*field.how.split(" The first choice")[:1], *filter(None, [NOTES.get(field.name)])]),
        )
        for field in SAMPLED
    ),
    *(one.field() for one in FIXED_OPTIONS),
    *(Field(name, "supported", f"Changes nothing: {why}.", {}) for name, why in IGNORED.items()),
)

THOUGHTS = (
    "thoughts are not separated from an answer; where a chat template knows them, say so in `chat_template_kwargs`"
)
REFUSED = (
    Fixed("truncate", (False,), "a prompt that is too long is refused, never cut"),
    Fixed("shift", (False,), "an answer ends where the context does"),
)
OF_GENERATE = (
    Fixed("suffix", ("",), "no model here inserts text"),
    Fixed("template", ("",), "the template is the model's own"),
    Fixed("context", ([],), "send the conversation to /api/chat"),
    Fixed("images", ([],), "prompts are text alone"),
    *(Fixed(name, (), "no model here makes images") for name in ("width", "height", "steps")),
)
MESSAGE = closed(
    ["role"],
    role={"enum": ["system", "user", "assistant", "tool"]},
    content=STRING,
    thinking=STRING,
    images={"type": "array", "maxItems": 0},
    tool_calls={"type": "array", "items": {"type": "object"}},
    tool_name=STRING,
    tool_call_id=STRING,
)
OF_OPTIONS = closed([], **{one.name: one.schema for one in OPTIONS})
COMMON = (
    MODEL._replace(how=f"{MODEL.how} `:latest` may stand behind it."),
    Field(
        "format",
        "supported",
        "`json`: the answer is an object of JSON; a schema: it is JSON that the schema describes. A keyword that "
        "cannot be enforced is [left out](openai.md#schemas).",
        {"oneOf": [{"enum": ["", "json"]}, {"type": "object"}]},
    ),
    Field("options", "supported", "[How to draw](#options), and how long.", OF_OPTIONS),
    Field("stream", "supported", "false: one object instead of lines.", BOOLEAN | {"default": True}),
    Field(
        "keep_alive",
        "supported",
        "Seconds, or a duration as `5m`. Changes nothing: the model stays where it is.",
        {"oneOf": [NUMBER, STRING]},
    ),
    *LOGPROBS,
    Field(
        "think",
        "supported",
        "`false`: the variable `enable_thinking` of the chat template is false, unless `chat_template_kwargs` says "
        "otherwise. Other values are refused: thoughts are not separated from an answer.",
        {"const": False},
    ),
    *(one.field() for one in REFUSED),
    TEMPLATE_KWARGS,
    *(one for one in OURS if one.name == "priority"),
)
CHAT = (
    Field(
        "messages",
        "supported",
        "The model's chat template makes the prompt of them. Roles: system, user, assistant, tool. A result belongs to "
        "the call that its `tool_call_id` names, or the first one of its `tool_name`, or the first one without a "
        "result. `thinking` is ignored; images are refused. Empty: an answer at once, that the model is loaded.",
        {"type": "array", "items": MESSAGE},
    ),
    Field(
        "tools",
        "supported",
        "Functions that the answer may call, as for [a chat](openai.md#tools).",
        {"type": "array", "maxItems": 128, "items": closed(["type", "function"], type=IS_FUNCTION, function=FUNCTION)},
    ),
    *COMMON,
)
GENERATE = (
    Field(
        "prompt",
        "supported",
        "A user's message to the chat template. It is the prompt as it stands with `raw`, and where the model has no "
        "template. Empty: an answer at once, that the model is loaded.",
        STRING,
    ),
    Field("system", "supported", "A system's message before it.", STRING),
    Field("raw", "supported", "true: no template. Not with `system` or `chat_template_kwargs`.", BOOLEAN),
    *COMMON,
    *(one.field() for one in OF_GENERATE),
)
FIXED = {"think": ((False,), THOUGHTS), **{one.name: (one.values, one.why) for one in (*REFUSED, *OF_GENERATE)}}
FIXED_IN_OPTIONS = {one.name: (one.values, one.why) for one in FIXED_OPTIONS}
