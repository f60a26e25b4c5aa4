# /// script
# dependencies = ["anthropic==2.14.0"]
# ///
"""Anthropic's client for Python: a text, a stream with a call, the turn after it, and a count."""

import os
from typing import Any

import anthropic

client = anthropic.Anthropic(base_url=os.environ["ORCA"], api_key="none", max_retries=0)
user: Any = {"role": "user", "content": "Bern?"}
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
asked: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "tools": [{"name": "weather", "input_schema": schema}]}
with client.messages.stream(messages=[user], system="Be brief", **asked) as stream:
    answer = stream.get_final_message()
(call,) = answer.content
assert call.type == "tool_use"
assert (call.input, answer.stop_reason) == ({"city": "Bern"}, "tool_use")
result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "5"}]}
last = client.messages.create(messages=[user, {"role": "assistant", "content": answer.content}, result], **asked)
assert last.content[0].type == "text"
assert last.content[0].text == "It is 5 degrees in Bern."
assert client.messages.count_tokens(model="tiny", messages=[user]).input_tokens > 0
print("anthropic", anthropic.__version__)
