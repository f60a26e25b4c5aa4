"""The HTTP door's description: `/openapi.json` for programs, `/docs` for people. Nothing is loaded from elsewhere."""

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from orca_common.release import VERSION

from ..anthropic.fields import FIELDS as MESSAGE_FIELDS
from ..anthropic.fields import OF_PROMPTS
from ..ollama.fields import CHAT, GENERATE
from ..openai.chat.fields import FIELDS as CHAT_FIELDS
from ..openai.chat.tools import CALL
from ..openai.completions.request import FIELDS
from ..openai.fields import BOOLEAN, IDS, INTEGER, STRING, Field, closed, thing
from ..openai.responses.fields import FIELDS as RESPONSE_FIELDS

JSON, STREAM, LINES = "application/json", "text/event-stream", "application/x-ndjson"
Schema = dict[str, Any]


def described(name: str) -> Schema:
    """The OpenAPI document of a door that serves the model of this name."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Orca",
            "version": VERSION,
            "description": f"Serves {name}. A field that is not supported is refused by its name.",
        },
        "paths": PATHS,
        "components": {
            "schemas": SCHEMAS,
            "responses": {
                name: answer(f"The error, in the shape of {whose}.", name)
                for name, whose in (("Error", "OpenAI"), ("MessageError", "Anthropic"), ("OllamaError", "Ollama"))
            },
        },
    }


def reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def answer(description: str, schema: str, *kinds: str) -> Schema:
    """kinds: of its content; without any JSON."""
    content = {kind: {"schema": reference(schema)} for kind in kinds or (JSON,)}
    return {"description": description, "content": content}


def operation(
    summary: str, answers: Mapping[str, Schema], body: str | None = None, wrong: str = "Error", **more: Any
) -> Schema:
    """One method of a path. body: the name of its body's schema. wrong: that of an error's answer."""
    error = {"$ref": f"#/components/responses/{wrong}"}
    found: Schema = {"summary": summary, "responses": {**answers, "default": error}}
    if body is not None:
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": reference(body)}}}
    return found | more


def body_of(fields: Iterable[Field], *required: str) -> Schema:
    """The schema of a method's body."""
    described = {field.name: {**field.schema, "description": field.how} for field in fields}
    return closed(required, **described)


def line_of(**content: Schema) -> Schema:
    """The schema of a line of Ollama's. content: its member with the text. The last line has counts and durations."""
    counts = ("prompt_eval_count", "eval_count")
    durations = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
    return thing(
        ("model", "created_at", *content, "done"),
        model=STRING,
        created_at=STRING,
        **content,
        done=BOOLEAN,
        done_reason={"enum": ["stop", "length", "load", "unload"]},
        logprobs={"type": "array", "items": reference("ChatToken")},
        **dict.fromkeys((*counts, *durations), INTEGER),
    )


def nullable(name: str) -> Schema:
    return {"anyOf": [reference(name), {"type": "null"}]}


def answers(kind: str, choice: str) -> Schema:
    """The schema of an answer, or of a chunk of one. kind: OpenAI's `object`."""
    return thing(
        ("id", "object", "created", "model", "choices"),
        id=STRING,
        object={"const": kind},
        created=INTEGER,
        model=STRING,
        choices={"type": "array", "items": reference(choice)},
        usage=nullable("Usage"),
    )


def choice_of(logprobs: str, **content: Schema) -> Schema:
    """The schema of a choice. content: its member with the text."""
    return thing(
        ("index", *content, "logprobs", "finish_reason"),
        index=INTEGER,
        **content,
        logprobs=nullable(logprobs),
        finish_reason=FINISH,
    )


def parameter(name: str, where: str, description: str, schema: Schema, required: bool = False) -> Schema:
    return {"name": name, "in": where, "description": description, "schema": schema, "required": required}


REQUEST_ID = parameter("X-Request-Id", "header", "Your name of this request; it is given back.", STRING)
POSITIVE = {"type": "number", "exclusiveMinimum": 0}
TIMEOUT = parameter("X-Request-Timeout", "header", "The request's deadline, in seconds.", POSITIVE)
COMMENTS = parameter("X-Stream-Comments", "header", "`off`: a silent stream gets no comments.", {"enum": ["on", "off"]})
EVENT_IDS = parameter(
    "X-Stream-Ids",
    "header",
    "`on`: the events of a stream have ids. Absent: with `detach_grace`.",
    {"enum": ["on", "off"]},
)
EVENT_ID = parameter("Last-Event-ID", "header", "The id of the last event seen; counts before `from`.", STRING)
FROM = parameter("from", "query", "Tokens that were seen; 0 when absent.", {"type": "integer", "minimum": 0})
USAGE = parameter("include_usage", "query", "A last chunk with the usage.", BOOLEAN)
MODEL = parameter("model", "query", "The answer's model, for proxies that choose a release by it.", STRING)
ID = parameter("id", "path", "The answer's id; of one with several choices with -K behind it.", STRING, True)
RESPONSE_ID = parameter("id", "path", "The response's id.", STRING, True)
STREAMS = parameter("stream", "query", "The events of the response, also of one that runs.", BOOLEAN)
AFTER = parameter("starting_after", "query", "The number of the last event seen.", {"type": "integer", "minimum": 0})

FINISH = {"enum": ["stop", "length", "tool_calls", None]}
STATUS = {"enum": ["in_progress", "completed", "incomplete"]}
SCORED = {"token": STRING, "logprob": {"type": "number"}, "bytes": {"type": "array", "items": INTEGER}}

OLLAMA_MODELS = {"200": answer("The list.", "OllamaModels")}

PATHS: dict[str, Schema] = {
    "/v1/completions": {
        "post": operation(
            "Completes prompts.",
            {"200": answer("The completion; with `stream` as server-sent events.", "Completion")},
            "CompletionRequest",
            parameters=[REQUEST_ID, TIMEOUT, COMMENTS, EVENT_IDS],
        )
    },
    "/v1/completions/{id}": {
        "get": operation(
            "Takes a completion's stream up where it broke, at any endpoint.",
            {"200": answer("The rest of the stream, as server-sent events.", "Completion", STREAM)},
            parameters=[ID, FROM, USAGE, MODEL, EVENT_ID, REQUEST_ID, TIMEOUT, COMMENTS],
        )
    },
    "/v1/chat/completions": {
        "post": operation(
            "Answers a conversation.",
            {"200": answer("The assistant's message; with `stream` as server-sent events.", "Chat")},
            "ChatRequest",
            parameters=[REQUEST_ID, TIMEOUT, COMMENTS, EVENT_IDS],
        )
    },
    "/v1/chat/completions/{id}": {
        "get": operation(
            "Takes a chat's stream up where it broke, at any endpoint.",
            {"200": answer("The rest of the stream, as server-sent events.", "ChatChunk", STREAM)},
            parameters=[ID, FROM, USAGE, MODEL, EVENT_ID, REQUEST_ID, TIMEOUT, COMMENTS],
        )
    },
    "/v1/responses": {
        "post": operation(
            "Answers a conversation by a response.",
            {"200": answer("The response; with `stream` its events.", "Response")},
            "ResponseRequest",
            parameters=[REQUEST_ID, TIMEOUT, COMMENTS],
        )
    },
    "/v1/responses/{id}": {
        "get": operation(
            "A response that is kept, as far as it has come; or its events, at any endpoint.",
            {"200": answer("The response; with `stream` its events.", "Response")},
            parameters=[RESPONSE_ID, STREAMS, AFTER, MODEL, REQUEST_ID, TIMEOUT, COMMENTS],
        )
    },
    "/v1/messages": {
        "post": operation(
            "Answers a conversation by a message, as Anthropic's API does.",
            {"200": answer("The message; with `stream` its events.", "AnswerMessage")},
            "MessageRequest",
            wrong="MessageError",
            parameters=[REQUEST_ID, TIMEOUT, COMMENTS],
        )
    },
    "/v1/messages/count_tokens": {
        "post": operation(
            "The number of a prompt's tokens.",
            {"200": answer("The number.", "TokenCount")},
            "CountRequest",
            wrong="MessageError",
        )
    },
    "/api/chat": {
        "post": operation(
            "Answers a conversation, as Ollama's API does.",
            {"200": answer("Lines of JSON; with `stream: false` one object.", "OllamaChat", LINES, JSON)},
            "OllamaChatRequest",
            wrong="OllamaError",
            parameters=[REQUEST_ID, TIMEOUT, COMMENTS],
        )
    },
    "/api/generate": {
        "post": operation(
            "Answers a prompt, as Ollama's API does.",
            {"200": answer("Lines of JSON; with `stream: false` one object.", "OllamaText", LINES, JSON)},
            "OllamaGenerateRequest",
            wrong="OllamaError",
            parameters=[REQUEST_ID, TIMEOUT, COMMENTS],
        )
    },
    "/api/tags": {
        "get": operation("The models that are served, in Ollama's shape.", OLLAMA_MODELS, wrong="OllamaError")
    },
    "/api/ps": {"get": operation("The same with the length of their context.", OLLAMA_MODELS, wrong="OllamaError")},
    "/api/show": {
        "post": operation(
            "What a model is, in Ollama's shape.",
            {"200": answer("The model.", "OllamaModel")},
            "OllamaShowRequest",
            wrong="OllamaError",
        )
    },
    "/api/version": {
        "get": operation(
            "The version of Orca, for Ollama's clients.",
            {"200": answer("The version.", "Version")},
            wrong="OllamaError",
        )
    },
    "/v1/models": {
        "get": operation("The models that are served at this address.", {"200": answer("The list.", "Models")})
    },
    "/v1/models/{model}": {
        "get": operation(
            "The model that is served.",
            {"200": answer("The model.", "Model")},
            parameters=[parameter("model", "path", "Its name.", STRING, True)],
        )
    },
    "/v1/load_lora_adapter": {
        "post": operation(
            "Loads an adapter beside the model; for operators.",
            {"200": answer("It is served.", "Said", "text/plain")},
            "LoadAdapterRequest",
        )
    },
    "/v1/unload_lora_adapter": {
        "post": operation(
            "Takes an adapter from new requests; for operators.",
            {"200": answer("It is not served any more.", "Said", "text/plain")},
            "UnloadAdapterRequest",
        )
    },
    "/tokenize": {
        "post": operation("The tokens of a prompt.", {"200": answer("The tokens.", "Tokens")}, "TokenizeRequest")
    },
    "/tokenizer_info": {
        "get": operation(
            "What the checkpoint says of its tokenizer.", {"200": answer("The configuration.", "TokenizerInfo")}
        )
    },
    "/detokenize": {
        "post": operation("The text of tokens.", {"200": answer("The text.", "Text")}, "DetokenizeRequest")
    },
    "/health": {
        "get": operation("Whether requests can be served; 503 says why not.", {"200": answer("Ready.", "Health")})
    },
    "/version": {"get": operation("The version of Orca.", {"200": answer("The version.", "Version")})},
}

OF_CHATS = {field.name: field.schema for field in CHAT_FIELDS}
SCHEMAS: dict[str, Schema] = {
    "LoadAdapterRequest": closed(("lora_name", "lora_path"), lora_name=STRING, lora_path=STRING, load_inplace=BOOLEAN),
    "UnloadAdapterRequest": closed(("lora_name",), lora_name=STRING, lora_int_id=INTEGER),
    "Said": STRING,
    "CompletionRequest": body_of(FIELDS, "prompt"),
    "ChatRequest": body_of(CHAT_FIELDS, "messages"),
    "Completion": answers("text_completion", "Choice"),
    "Choice": choice_of("Logprobs", text=STRING),
    "Chat": answers("chat.completion", "ChatChoice"),
    "ChatChoice": choice_of("ChatLogprobs", message=reference("Message")),
    "Message": thing(
        ("role", "content", "refusal"),
        role={"const": "assistant"},
        content={"type": ["string", "null"]},
        refusal={"type": "null"},
        tool_calls={"type": "array", "items": CALL},
    ),
    "ChatChunk": answers("chat.completion.chunk", "ChatDelta"),
    "ChatDelta": choice_of("ChatLogprobs", delta=reference("Delta")),
    "Delta": thing(
        role={"const": "assistant"},
        content=STRING,
        tool_calls={"type": "array", "items": reference("CallDelta")},
    ),
    "CallDelta": thing(
        ("index", "function"),
        index=INTEGER,
        id=STRING,
        type={"const": "function"},
        function=thing(("arguments",), name=STRING, arguments=STRING),
    ),
    "ChatLogprobs": thing(
        ("content", "refusal"),
        content={"type": "array", "items": reference("ChatToken")},
        refusal={"type": "null"},
    ),
    "ChatToken": thing(
        ("token", "logprob", "bytes", "top_logprobs"),
        **SCORED,
        top_logprobs={"type": "array", "items": thing(tuple(SCORED), **SCORED)},
    ),
    "Logprobs": thing(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"),
        tokens={"type": "array", "items": STRING},
        token_logprobs={"type": "array", "items": {"type": ["number", "null"]}},
        top_logprobs={
            "type": "array",
            "items": {"type": ["object", "null"], "additionalProperties": {"type": "number"}},
        },
        text_offset={"type": "array", "items": INTEGER},
    ),
    "ResponseRequest": body_of(RESPONSE_FIELDS, "input"),
    "Response": thing(
        ("id", "object", "created_at", "status", "model", "output", "usage"),
        id=STRING,
        object={"const": "response"},
        created_at=INTEGER,
        status={"enum": ["in_progress", "completed", "incomplete", "failed", "cancelled"]},
        model=STRING,
        output={"type": "array", "items": {"oneOf": [reference("OutputMessage"), reference("FunctionCall")]}},
        usage={"anyOf": [reference("ResponseUsage"), {"type": "null"}]},
    ),
    "MessageRequest": body_of(MESSAGE_FIELDS, "messages"),
    "CountRequest": body_of(OF_PROMPTS, "messages"),
    "TokenCount": thing(("input_tokens",), input_tokens=INTEGER),
    "AnswerMessage": thing(
        ("id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"),
        id=STRING,
        type={"const": "message"},
        role={"const": "assistant"},
        model=STRING,
        content={
            "type": "array",
            "items": {
                "oneOf": [
                    thing(("type", "text"), type={"const": "text"}, text=STRING),
                    thing(
                        ("type", "id", "name", "input"),
                        type={"const": "tool_use"},
                        id=STRING,
                        name=STRING,
                        input={"type": "object"},
                    ),
                ]
            },
        },
        stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        stop_sequence={"type": ["string", "null"]},
        usage=thing(("input_tokens", "output_tokens"), input_tokens=INTEGER, output_tokens=INTEGER),
    ),
    "OllamaChatRequest": body_of(CHAT),
    "OllamaGenerateRequest": body_of(GENERATE),
    "OllamaShowRequest": closed(
        (),
        model=STRING,
        name=STRING,
        verbose=BOOLEAN,
        system={"const": ""},
        template={"const": ""},
        options={"type": "object", "maxProperties": 0},
    ),
    "OllamaError": thing(("error",), error=STRING),
    "MessageError": thing(
        ("type", "error"),
        type={"const": "error"},
        error=thing(("type", "message"), type=STRING, message=STRING),
    ),
    "OllamaChat": line_of(
        message=thing(
            ("role", "content"),
            role={"const": "assistant"},
            content=STRING,
            tool_calls={"type": "array", "items": {"type": "object"}},
        )
    ),
    "OllamaText": line_of(response=STRING),
    "OllamaModels": thing(("models",), models={"type": "array", "items": {"type": "object"}}),
    "OllamaModel": thing(
        ("details", "model_info", "capabilities"),
        details={"type": "object"},
        model_info={"type": "object"},
        capabilities={"type": "array", "items": STRING},
    ),
    "OutputMessage": thing(
        ("id", "type", "status", "role", "content"),
        id=STRING,
        type={"const": "message"},
        status=STATUS,
        role={"const": "assistant"},
        content={
            "type": "array",
            "items": thing(("type", "text"), type={"const": "output_text"}, text=STRING),
        },
    ),
    "FunctionCall": thing(
        ("id", "type", "status", "call_id", "name", "arguments"),
        id=STRING,
        type={"const": "function_call"},
        status=STATUS,
        call_id=STRING,
        name=STRING,
        arguments=STRING,
    ),
    "ResponseUsage": thing(
        ("input_tokens", "output_tokens", "total_tokens"),
        input_tokens=INTEGER,
        output_tokens=INTEGER,
        total_tokens=INTEGER,
    ),
    "Usage": thing(
        ("prompt_tokens", "completion_tokens", "total_tokens"),
        prompt_tokens=INTEGER,
        completion_tokens=INTEGER,
        total_tokens=INTEGER,
    ),
    "Models": thing(("object", "data"), object={"const": "list"}, data={"type": "array", "items": reference("Model")}),
    "Model": thing(
        ("id", "object", "created", "owned_by"),
        id=STRING,
        object={"const": "model"},
        created=INTEGER,
        owned_by=STRING,
        max_model_len=INTEGER,
        vocab_size=INTEGER,
        chat_template=BOOLEAN,
        parent=STRING,
    ),
    "TokenizeRequest": closed(
        (),
        model=STRING,
        prompt=STRING,
        messages=OF_CHATS["messages"],
        tools=OF_CHATS["tools"],
        chat_template_kwargs=OF_CHATS["chat_template_kwargs"],
        add_generation_prompt={"const": True},
        add_special_tokens=BOOLEAN,
        return_token_strs=BOOLEAN,
    ),
    "TokenizerInfo": {"type": "object"},
    "Tokens": thing(
        ("count", "max_model_len", "tokens", "token_strs"),
        count=INTEGER,
        max_model_len=INTEGER,
        tokens=IDS,
        token_strs={"type": ["array", "null"], "items": STRING},
    ),
    "DetokenizeRequest": closed(("tokens",), model=STRING, tokens=IDS),
    "Text": thing(("prompt",), prompt=STRING),
    "Health": thing(("status",), status={"const": "ok"}),
    "Version": thing(("version",), version=STRING),
    "Error": thing(
        ("error",),
        error=thing(
            ("message", "type", "param", "code"),
            message=STRING,
            type=STRING,
            param={"type": ["string", "null"]},
            code={"type": ["string", "null"]},
        ),
    ),
}

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Orca: {name}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b2430; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #12171e; color: #dfe6ee; }} a {{ color: #8ab8ff; }} }}
code, pre {{ font: 0.9em ui-monospace, monospace; }}
pre {{ padding: 1rem; border: 1px solid #8884; border-radius: 6px; white-space: pre-wrap; overflow-wrap: anywhere; }}
table {{ border-collapse: collapse; width: 100%; }}
td, th {{ text-align: left; vertical-align: top; padding: 0.35rem 0.8rem 0.35rem 0; border-top: 1px solid #8884; }}
td:first-child {{ white-space: nowrap; }}
</style>
</head>
<body>
<h1>Orca serves <code>{name}</code></h1>
<p>Chats, responses and completions are OpenAI's APIs, messages are Anthropic's, paths below /api
are Ollama's. A field that is not supported is refused by name, never ignored. The whole description is
<a href="openapi.json">openapi.json</a>.</p>
<pre>curl {base}/v1/chat/completions -H "Content-Type: application/json" \\
  -d '{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
curl {base}/v1/completions -H "Content-Type: application/json" \\
  -d '{{"model": "{name}", "prompt": "import os", "max_tokens": 8}}'</pre>
<h2>Paths</h2>
<table><tr><th>path</th><th>what</th></tr>{paths}</table>
<h2>Fields of <code>POST /v1/chat/completions</code></h2>
<table><tr><th>field</th><th></th><th>how</th></tr>{chat_fields}</table>
<h2>Fields of <code>POST /v1/responses</code></h2>
<table><tr><th>field</th><th></th><th>how</th></tr>{response_fields}</table>
<h2>Fields of <code>POST /v1/messages</code></h2>
<table><tr><th>field</th><th></th><th>how</th></tr>{message_fields}</table>
<h2>Fields of <code>POST /api/chat</code></h2>
<table><tr><th>field</th><th></th><th>how</th></tr>{ollama_fields}</table>
<h2>Fields of <code>POST /v1/completions</code></h2>
<table><tr><th>field</th><th></th><th>how</th></tr>{fields}</table>
</body>
</html>
"""


def page(name: str, base: str) -> str:
    """The page for people. base: the door's address as the reader knows it."""
    paths = "".join(
        f"<tr><td><code>{method.upper()} {escape(path)}</code></td><td>{escape(found['summary'])}</td></tr>"
        for path, methods in PATHS.items()
        for method, found in methods.items()
    )
    return PAGE.format(
        name=escape(name),
        base=escape(base),
        paths=paths,
        chat_fields=rows(CHAT_FIELDS),
        response_fields=rows(RESPONSE_FIELDS),
        message_fields=rows(MESSAGE_FIELDS),
        ollama_fields=rows(CHAT),
        fields=rows(FIELDS),
    )


def rows(fields: Iterable[Field]) -> str:
    """The rows of a method's table."""
    return "".join(
        f"<tr><td><code>{field.name}</code></td><td>{field.support}</td><td>{sentence(field.how)}</td></tr>"
        for field in fields
    )


def sentence(text: str) -> str:
    """HTML of a text whose code stands in backticks."""
    parts = [escape(part) for part in text.split("`")]
    return "".join(f"<code>{part}</code>" if n % 2 else part for n, part in enumerate(parts))
