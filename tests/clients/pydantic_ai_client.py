# /// script
# dependencies = ["pydantic-ai-slim[openai]==2.68.0"]
# ///
# pyright: reportMissingImports=false
"""pydantic-ai with OpenAI's responses and chats: a tool, a stream, and an answer by a tool and by a schema."""

import asyncio
import os
from importlib.metadata import version

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    city: str


def weather(city: str) -> str:
    """The weather of a city."""
    return f"5 degrees in {city}"


async def main() -> None:
    provider = OpenAIProvider(base_url=f"{os.environ['ORCA']}/v1", api_key="none")
    for model in (OpenAIResponsesModel("tiny", provider=provider), OpenAIChatModel("tiny", provider=provider)):
        await use(model)
    print("pydantic-ai-slim", version("pydantic-ai-slim"))


async def use(model: Model) -> None:
    agent = Agent(model, instructions="Be brief", tools=[weather])
    assert (await agent.run("Bern?")).output == "It is 5 degrees in Bern."
    async with agent.run_stream("Bern?") as stream:
        assert await stream.get_output() == "It is 5 degrees in Bern."
    assert (await Agent(model, output_type=City).run("Bern?")).output == City(city="Bern")
    assert (await Agent(model, output_type=NativeOutput(City)).run("Bern?")).output == City(city="Bern")


asyncio.run(main())
