"""Chat templates, rendered as transformers renders them, and the bounds of what a stranger's template may do.

The templates are our own texts in the constructs of eight well-known families.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from endpoint.harness import make_tokenizer
from tool_templates import TEMPLATES as TOOL_TEMPLATES
from transformers import PreTrainedTokenizerFast

from orca.v1.orca_pb2 import Chat, ChatMessage
from orca_common.errors import FailedPrecondition
from orca_endpoint.requests.chat_renderer import Renderer
from orca_endpoint.text.chat_template import CannotRender, ChatTemplate, read_chat_template
from orca_endpoint.text.tool_calls import syntax_in

SPECIAL = {"bos_token": "<|end|>", "eos_token": "</s>", "pad_token": "<pad>"}
NOW = datetime(2026, 7, 4, 12, 0)

CHATML = """{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' -}}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Llama 3.1's: a date, tools as indented JSON, slices, an exception
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|stop|>\\n\\nToday: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("one tool call at a time") }}
        {%- endif %}
        {{- '{"name": "' + message.tool_calls[0].function.name + '"}' }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start|>ipython<|stop|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- else %}
        {{- '<|start|>' + message['role'] + '<|stop|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|stop|>\\n\\n' }}{%- endif %}
"""

# Qwen 3's: a namespace that loops backwards to find the last question, thinking cut out of earlier answers
QWEN = """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<answer>') and message.content.endswith('</answer>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<answer>\\n' + content + '\\n</answer>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# Mistral's: roles must alternate, the system message goes into the last question, tools as Python writes them
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- if tools is not none %}{{- "[TOOLS]" ~ tools | string ~ "[/TOOLS]" }}{%- endif %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if message["role"] in ["user", "assistant"] %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("roles must alternate user and assistant") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "tool" %}
        {{- '[RESULT] {"content": ' + message.content | string + "}" }}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
{{- user_messages | map(attribute="content") | map("length") | join(",") -}}
"""

# Gemma's: refuses a system message, calls the assistant a model; the newest has macros, dictsort and blocks that set
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}
{% set role = message['role'] %}{% endif %}
{{ '<turn>' + role + '\\n' + message['content'] | trim + '</turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<turn>model\\n'}}{% endif %}"""

GEMMA_MACROS = """{%- macro spelled(value, depth=0) -%}
    {%- if value is boolean -%}{{ 'true' if value else 'false' }}
    {%- elif value is mapping -%}{
        {%- for key, one in value | dictsort -%}
            {{ key }}:{{ spelled(one, depth + 1) }}{{ ',' if not loop.last }}
        {%- endfor -%}}
    {%- elif value is string -%}<q>{{ value | replace('"', "'") }}<q>
    {%- elif value is sequence -%}
        [{% for one in value %}{{ spelled(one, depth + 1) }}{{ ", " if not loop.last }}{% endfor %}]
    {%- else -%}{{ value }}
    {%- endif -%}
{%- endmacro -%}
{{ bos_token }}
{%- for tool in tools or [] %}
    <tool>{{ tool.function.name }}{{ spelled(tool.function.get('parameters', {})) }}</tool>
{% endfor -%}
{%- for message in messages %}
    {%- set body %}{{ message.get('name', '') ~ message.content.split('\\n') | first | upper }}{% endset %}
<turn>{{ message.role }}|{{ body | indent(2) }}</turn>
    {%- if loop.index is divisibleby(2) %}{% continue %}{% endif %} odd
    {%- if message.content == 'stop' %}{% break %}{% endif %}
{%- endfor %}"""

# Phi's: the tools stand in the system message
PHI = """{% for message in messages %}
{%- if message['role'] == 'system' and 'name' in message and message['name'] is not none %}
{{ '<|' + message['role'] + '|>' + message['content'] + '<|name|>' + message['name'] + '<|/name|>' + '<|end|>' }}
{%- else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""

# DeepSeek's: one namespace gathers the system messages, answers lose their thoughts and are marked for training
DEEPSEEK = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(is_first=true, prompt='', is_tool=false) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{%- set ns.prompt = ns.prompt + ('' if ns.is_first else '\\n\\n') + message['content'] %}{% set ns.is_first = false %}
{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.prompt }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '<User>' ~ message['content'] }}
{%- elif message['role'] == 'assistant' %}
{%- set content = message['content'] %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
<Assistant>{% generation %}{{ content ~ eos_token }}{% endgeneration %}
{%- endif %}{%- endfor -%}
{% if add_generation_prompt %}{{ '<Assistant>' }}{% endif %}"""

TEMPLATES = {
    "chatml": CHATML,
    "llama": LLAMA,
    "qwen": QWEN,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "gemma with macros": GEMMA_MACROS,
    "phi": PHI,
    "deepseek": DEEPSEEK,
}
SYSTEM = {"role": "system", "content": " Be brief; é <b> & 東京 \n"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi 😀\nthere"}],
    "system": [SYSTEM, {"role": "user", "content": "Hi"}],
    "long": [
        {"role": "user", "content": " 1 "},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2\n"},
        {"role": "user", "content": "<answer>3</answer>"},
        {"role": "assistant", "content": "stop"},
        {"role": "user", "content": 'say "x"', "name": "Ann"},
    ],
    "tools": [
        {"role": "user", "content": "4"},
        {"role": "assistant", "content": "5"},
        {"role": "tool", "content": '{"a": "ü"}', "tool_call_id": "c1"},
        {"role": "tool", "content": "6", "tool_call_id": "c2"},
    ],
    "empty": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "strict": True, "z": [1, 2.5, None], "a": {"é": "<q>"}},
        },
    }
]


def theirs(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    """The text that transformers makes; an error as a word."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), **SPECIAL)
    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True, **variables
        )
    except Exception:  # jinja2's, and Python's own
        return "an error"
    assert isinstance(text, str)
    return text


def ours(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    try:
        return ChatTemplate(template, SPECIAL, lambda: NOW).render(messages, variables, 1 << 20)
    except CannotRender:
        return "an error"


@pytest.fixture(autouse=True)
def one_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of transformers, which cannot be given: the module's name `datetime`."""

    class Fixed(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Fixed":
            return cls(2026, 7, 4, 12, 0)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Fixed)


@pytest.mark.parametrize("name", TEMPLATES)
def test_it_renders_as_transformers_does(name: str) -> None:
    seen = set()
    assert syntax_in(TEMPLATES[name]) is None, "no calls come by these"
    for messages in CHATS.values():
        for variables in ({}, {"tools": TOOLS}, {"enable_thinking": False, "date_string": "1 Jan"}):
            text = ours(TEMPLATES[name], messages, **variables)
            assert text == theirs(TEMPLATES[name], messages, **variables)
            seen.add(text)
    assert len(seen) > len(CHATS) / 2, "it says something"


# Messages with calls, their arguments as objects.
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "4"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": {"b": ["é<", 1.5]}}}
        ],
    },
    {"role": "tool", "content": '{"a": "ü"}', "tool_call_id": "abcdefgh1"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "6"},
]


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_tools_and_calls_are_rendered_as_transformers_renders_them(name: str) -> None:
    seen = set()
    for messages in (CALLED, CALLED[:1], CALLED[:3]):
        for variables in ({}, {"tools": TOOLS}):
            text = ours(TOOL_TEMPLATES[name], messages, **variables)
            assert text == theirs(TOOL_TEMPLATES[name], messages, **variables)
            assert text != "an error"
            seen.add(text)
    assert len(seen) == 6


def test_the_families_differ() -> None:
    texts = {name: ours(template, CHATS["long"]) for name, template in TEMPLATES.items()}
    assert len(set(texts.values())) == len(TEMPLATES)
    assert "an error" not in texts.values()
    assert "04 Jul 2026" in texts["llama"]
    assert ours(GEMMA, CHATS["system"]) == ours(MISTRAL, CHATS["long"][1:]) == "an error"


FILES: dict[str, tuple[dict[str, str], Any, str | None]] = {  # files, chat_template of the configuration, what is used
    "none": ({}, None, None),
    "text": ({}, "a", "a"),
    "list": ({}, [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
    "file": ({"chat_template.jinja": "f"}, "a", "f"),
    "files": ({"chat_template.jinja": "f", "additional_chat_templates/tool_use.jinja": "t"}, "a", "f"),
    "default of several": ({"additional_chat_templates/default.jinja": "x"}, "a", "x"),
}


@pytest.mark.parametrize("case", FILES)
def test_where_a_template_is(tmp_path: Path, case: str) -> None:
    """transformers itself reads the same folder."""
    files, configured, used = FILES[case]
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = {**SPECIAL, "bos_token": {"content": "<|end|>", "__type": "AddedToken"}, "chat_template": configured}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "{{ bos_token }}")
    template, reference = read_chat_template(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    if used is None:
        assert template is reference.chat_template is None
        return
    assert template is not None
    with_tools = reference.apply_chat_template(CHATS["one"], tools=TOOLS, tokenize=False)
    assert template.tool_use.render(CHATS["one"], {"tools": TOOLS}, 100) == with_tools
    text = template.render(CHATS["one"], {}, 100)
    assert text == used + ("<|end|>" if files else "")
    assert text == reference.apply_chat_template(CHATS["one"], tokenize=False)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"chat_template": 5}, "must be a text or a list, not 5"),
        ({"chat_template": ["a"]}, "no named template"),
        ({"chat_template": [{"name": "rag", "template": "a"}]}, "chat templates \\(rag\\), but none is named"),
        ({"chat_template": "{% for %}"}, "its chat template is not valid"),
        ({"chat_template": "{{ 'a' | nothing }}"}, "No filter named 'nothing'"),
        ({"chat_template": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"}, "its chat template is not valid"),
    ],
)
def test_a_template_that_cannot_be_used_stops_the_start(tmp_path: Path, config: dict[str, Any], problem: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(FailedPrecondition, match=problem):
        read_chat_template(tmp_path)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}", "more than 0.2 s"),
        ("{% for i in range(99999) %}{{ 'abc' * 100 }}{% endfor %}", "more than 1000 characters"),
        ("{{ 'a' * 10 ** 9 }}", "too large"),
        ("{{ 10 ** 999 }}", "too large"),
        ("{{ [0] * 99999999 }}", "too large"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% set n = namespace(__class__=1) %}", "SecurityError"),
        ("{{ (().__class__.__base__.__subclasses__)() }}", "SecurityError|UndefinedError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ nothing.at_all }}", "UndefinedError"),
        ("{{ raise_exception('only ' ~ messages | length) }}", "refuses them: only 1"),
    ],
)
def test_what_a_template_cannot_do(template: str, problem: str) -> None:
    with pytest.raises(CannotRender, match=problem):
        ChatTemplate(template, {}).render(CHATS["one"], {}, 1000, seconds=0.2)


def test_a_template_does_not_change_what_it_is_given() -> None:
    variables, message = {"a": {"b": [1]}}, dict(CHATS["one"][0])
    text = ChatTemplate("{% set messages = [] %}{{ a.b }}{{ bos_token }}", SPECIAL).render([message], variables, 100)
    assert text == "[1]<|end|>"
    assert (variables, [message]) == ({"a": {"b": [1]}}, CHATS["one"])


LOOP = "{% for m in messages %}[{{ m.role }}]{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"
WALKING = {
    "members": LOOP,
    "names": LOOP.replace("m.content", "m['content']"),
    "filtered": LOOP.replace("m.content", "m.content | selectattr('type', 'equalto', 'text')"),
    "set": LOOP.replace("{% for c in m.content", "{% set parts = m['content'] %}{% for c in parts"),
    "macro": "{% macro show(content) %}{% for c in content %}{{ c['text'] }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
}
NOT_WALKING = {
    "text": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "either": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %}{% endfor %}",
    "either, turned": "{% for m in messages %}{% set content = m.content %}{% if content is not string %}"
    "{% for c in content %}{{ c.text }}{% endfor %}{% else %}{{ content }}{% endif %}{% endfor %}",
    "other loops": "{% for m in messages %}{% for word in m.content.split() %}{{ word }}{% endfor %}{% endfor %}",
}


def rendered(template: str, chat: Chat) -> str:
    """The text that the renderer of chats makes."""
    return Renderer(ChatTemplate(template, SPECIAL), 1 << 16, ()).answer(chat.SerializeToString())["text"]


@pytest.mark.parametrize("name", WALKING)
def test_a_template_that_walks_parts_gets_parts(name: str) -> None:
    """It made nothing of a text, without a word. transformers makes the same of parts."""
    chat = Chat(messages=[ChatMessage(role="user", content="Who is there?")])
    made = rendered(WALKING[name], chat)
    assert "Who is there?" in made
    parts = [{"role": "user", "content": [{"type": "text", "text": "Who is there?"}]}]
    assert made == theirs(WALKING[name], parts)


@pytest.mark.parametrize("name", NOT_WALKING)
def test_other_templates_get_texts(name: str) -> None:
    chat = Chat(messages=[ChatMessage(role="user", content="Who is there?")])
    made = rendered(NOT_WALKING[name], chat)
    assert made == theirs(NOT_WALKING[name], [{"role": "user", "content": "Who is there?"}])


@pytest.mark.parametrize("template", TEMPLATES.values())
def test_no_known_template_walks_parts_alone(template: str) -> None:
    assert not ChatTemplate(template, SPECIAL).walks_parts
