# /// script
# dependencies = ["litellm==1.108.7"]
# ///
# pyright: reportMissingImports=false
"""LiteLLM: a text, a stream, a tool and the turn after it, an answer by a schema."""

import os
from importlib.metadata import version
from typing import Any

import litellm
from pydantic import BaseModel


class City(BaseModel):
    city: str


SAID = "It is 5 degrees in Bern."
USER: Any = {"role": "user", "content": "Bern?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "weather", "parameters": SCHEMA}}]
asked: Any = {"model": "openai/tiny", "api_base": f"{os.environ['ORCA']}/v1", "api_key": "none", "num_retries": 0}
assert litellm.completion(messages=[USER], **asked).choices[0].message.content == SAID
chunks = litellm.completion(messages=[USER], stream=True, stream_options={"include_usage": True}, **asked)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == SAID
called = litellm.completion(messages=[USER], tools=TOOLS, tool_choice="auto", **asked).choices[0].message
(call,) = called.tool_calls
result = {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "5"}
last = litellm.completion(messages=[USER, called, result], tools=TOOLS, **asked)
assert last.choices[0].message.content == SAID
formed = litellm.completion(messages=[USER], response_format=City, **asked)
assert City.model_validate_json(formed.choices[0].message.content) == City(city="Bern")
print("litellm", version("litellm"))
