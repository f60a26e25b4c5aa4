# /// script
# dependencies = ["ollama==0.6.3", "pydantic==2.14.4"]
# ///
# pyright: reportMissingImports=false
"""Ollama's client for Python: models, texts, a stream with a call, the turn after it, an answer by a schema."""

import os
from importlib.metadata import version

from ollama import ChatResponse, Client
from pydantic import BaseModel


def weather(city: str) -> str:
    """The weather of a city.

    Args:
      city: its name

    Returns:
      str: the weather
    """
    return f"5 degrees in {city}"


class City(BaseModel):
    city: str


client = Client(os.environ["ORCA"])
(card,) = client.list().models
assert card.model == "tiny"
assert client.show("tiny").capabilities == ["completion", "tools"]
assert client.ps().models[0].model == "tiny"
turns = [{"role": "user", "content": "Bern?"}]
whole = client.chat("tiny", turns, options={"temperature": 0, "num_ctx": 4096}, keep_alive="5m")
assert (whole.message.content, whole.done_reason) == ("It is 5 degrees in Bern.", "stop")
parts: list[ChatResponse] = list(client.chat("tiny", turns, tools=[weather], stream=True, think=False))
calls = [call for part in parts for call in part.message.tool_calls or []]
assert [(call.function.name, call.function.arguments) for call in calls] == [("weather", {"city": "Bern"})]
assert parts[-1].done
answer = next(part.message for part in parts if part.message.tool_calls)
result = {"role": "tool", "tool_name": "weather", "content": weather("Bern")}
last = client.chat("tiny", [*turns, answer, result], tools=[weather])
assert last.message.content == "It is 5 degrees in Bern."
city = client.chat("tiny", turns, format=City.model_json_schema()).message.content
assert City.model_validate_json(city or "") == City(city="Bern")
told = client.generate("tiny", "Bern?", system="Be brief", stream=True)
assert "".join(part.response or "" for part in told) == "It is 5 degrees in Bern."
assert client.generate("tiny").done_reason == "load"
print("ollama", version("ollama"))
