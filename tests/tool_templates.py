"""Chat templates that take tools, in the constructs of well-known models, as texts of our own; and random tools."""

import random
from typing import Any

from schemas import an_object

# Qwen's and Hermes': tools in the system message, a block for each call, results in the turn of the user
HERMES = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "Functions:\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\nA call: <tool_call>\\n{\\"name\\": NAME, \\"arguments\\": OBJECT}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Llama 3.1's: one call at a time, results from `ipython`
LLAMA = """{{- bos_token }}
{%- if tools is not none %}
    {{- 'Answer by {"name": NAME, "parameters": OBJECT}.\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|stop|>{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}<|eot|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start|>ipython<|stop|>" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot|>" }}
    {%- else %}
        {{- '<|start|>' + message['role'] + '<|stop|>' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|stop|>' }}{%- endif %}"""

# Mistral's: a list of calls, ids of nine letters and digits
MISTRAL = """{{- bos_token }}
{%- if tools is not none %}
    {{- "[AVAILABLE_TOOLS][" }}
    {%- for tool in tools %}
        {{- '{"type": "function", "function": {' }}
        {%- for key, val in tool.function.items() if key != "return" %}
            {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
            {%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
            {%- if not loop.last %}{{- ", " }}{%- endif %}
        {%- endfor %}
        {{- "}}" }}{{- ", " if not loop.last }}
    {%- endfor %}
    {{- "][/AVAILABLE_TOOLS]" }}
{%- endif %}
{%- for message in messages %}
    {%- if message["role"] == "user" %}{{- "[INST]" + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS][" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = {"name": tool_call.function.name, "arguments": tool_call.function.arguments} | tojson %}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception("an id of a call must have nine letters and digits") }}
            {%- endif %}
            {{- out[:-1] }}{{- ', "id": "' + tool_call.id + '"}' }}{{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {#- the answer's own form: {"name": NAME, "arguments": OBJECT} -#}
    {%- elif message["role"] == "assistant" %}{{- message["content"] + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- endif %}
{%- endfor %}"""

# Mistral's since the tokenizer's version 13: a mark before the arguments
MISTRAL_ARGS = """{{- bos_token }}
{%- if tools is defined and tools is not none %}
    {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '[INST]' + message['content'] + '[/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- if message['content'] %}{{- message['content'] }}{%- endif %}
        {%- for tool_call in message['tool_calls'] or [] %}
            {%- set arguments = tool_call['function']['arguments'] %}
            {%- if arguments is not string %}{%- set arguments = arguments | tojson %}{%- endif %}
            {{- '[TOOL_CALLS]' + tool_call['function']['name'] + '[ARGS]' + arguments }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message['role'] == 'tool' %}{{- '[TOOL_RESULTS]' + message['content'] | string + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

TEMPLATES = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "mistral-args": MISTRAL_ARGS}
# Takes tools, but spells calls in a way that is not known here, though it begins like another one.
XML = "{{ tools | tojson }}<tool_call>\\n<function=NAME>\\n<parameter=arguments>\\n</parameter></function></tool_call>"


def some_tools(draw: random.Random, most: int = 4) -> list[dict[str, Any]]:
    """Tools with random schemas; one in five has no parameters."""
    names = draw.sample(["f", "f2", "get_weather", "get_weather-2", "Send", "_x"], k=draw.randint(1, most))
    return [{"type": "function", "function": a_function(draw, name)} for name in names]


def a_function(draw: random.Random, name: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "description": f'Does "{name}" <b>é</b>.'}
    return function if draw.random() < 0.2 else {**function, "parameters": an_object(draw, 3)}
