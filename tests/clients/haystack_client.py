# /// script
# dependencies = ["haystack-ai==3.4.1"]
# ///
# pyright: reportMissingImports=false
"""Haystack: a text, a stream, a tool and the turn after it, an answer by a schema."""

import os
from importlib.metadata import version
from typing import Annotated

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret
from pydantic import BaseModel

SAID = "It is 5 degrees in Bern."


class City(BaseModel):
    city: str


@tool
def weather(city: Annotated[str, "its name"]) -> str:
    """The weather of a city."""
    return f"5 degrees in {city}"


def generator(**more: object) -> OpenAIChatGenerator:
    address = f"{os.environ['ORCA']}/v1"
    return OpenAIChatGenerator(
        api_key=Secret.from_token("none"), model="tiny", api_base_url=address, max_retries=0, **more
    )


user = ChatMessage.from_user("Bern?")
assert generator().run([user])["replies"][0].text == SAID
parts: list[str] = []
generator(streaming_callback=lambda chunk: parts.append(chunk.content)).run([user])
assert "".join(parts) == SAID
agent = Agent(chat_generator=generator(), tools=[weather])
assert agent.run([user])["messages"][-1].text == SAID
formed = generator(generation_kwargs={"response_format": City}).run([user])["replies"][0]
assert City.model_validate_json(formed.text) == City(city="Bern")
print("haystack-ai", version("haystack-ai"))
