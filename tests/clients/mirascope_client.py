# /// script
# dependencies = ["mirascope[openai]==2.8.2"]
# ///
# pyright: reportMissingImports=false
"""Mirascope: a text, a stream, a tool and the turn after it, an answer by a schema, by both of OpenAI's APIs."""

import os
from importlib.metadata import version

from mirascope import llm
from pydantic import BaseModel

SAID = "It is 5 degrees in Bern."


class City(BaseModel):
    city: str


@llm.tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"5 degrees in {city}"


llm.register_provider("openai", scope="openai/", base_url=f"{os.environ['ORCA']}/v1", api_key="none")
for name in ("openai/tiny", "openai/tiny:completions"):
    model = llm.model(name)
    assert model.call("Bern?").text() == SAID
    assert "".join(model.stream("Bern?").text_stream()).strip() == SAID  # its texts end with a line
    called = model.call("Bern?", tools=[weather])
    assert called.resume(called.execute_tools()).text() == SAID
    assert model.call("Bern?", format=City).parse() == City(city="Bern")
print("mirascope", version("mirascope"))
