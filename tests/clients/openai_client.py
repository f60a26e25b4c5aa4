# /// script
# dependencies = ["openai==3.57.0"]
# ///
"""OpenAI's client for Python: responses whole, parsed, streamed, taken up behind an event; chats with a tool."""

import os
from typing import Any

import openai
from pydantic import BaseModel

SAID = "It is 5 degrees in Bern."
client = openai.OpenAI(base_url=f"{os.environ['ORCA']}/v1", api_key="none", max_retries=0)


class City(BaseModel):
    city: str


assert client.responses.create(model="tiny", input="Bern?").output_text == SAID
assert client.responses.parse(model="tiny", input="Bern?", text_format=City).output_parsed == City(city="Bern")
with client.responses.stream(model="tiny", input="Bern?") as stream:
    count = sum(1 for _ in stream)
    final = stream.get_final_response()
with client.responses.stream(response_id=final.id, starting_after=3) as stream:
    assert sum(1 for _ in stream) <= count
    assert stream.get_final_response().output_text == final.output_text

user: Any = {"role": "user", "content": "Bern?"}
asked: Any = {"model": "tiny", "messages": [user]}
assert client.chat.completions.create(**asked).choices[0].message.content == SAID
chunks = client.chat.completions.create(stream=True, **asked)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAID
assert client.chat.completions.parse(response_format=City, **asked).choices[0].message.parsed == City(city="Bern")
tools: Any = [openai.pydantic_function_tool(City, name="weather")]
with client.chat.completions.stream(tools=tools, **asked) as stream:
    called = stream.get_final_completion().choices[0].message
assert called.tool_calls
result: Any = [user, called, {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "5"}]
last = client.chat.completions.create(model="tiny", messages=result, tools=tools)
assert last.choices[0].message.content == SAID
assert client.models.list().data[0].id == "tiny"
assert client.completions.create(model="tiny", prompt="Bern?", max_tokens=100).choices[0].text == SAID
print("openai", openai.__version__)
