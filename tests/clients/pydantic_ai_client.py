# pyright: reportMissingImports=false
"""pydantic-ai with OpenAI's responses: a tool, a stream, and an answer by a schema."""

import asyncio
import os
from importlib.metadata import version

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    city: str


def weather(city: str) -> str:
    """The weather of a city."""
    return f"5 degrees in {city}"


async def main() -> None:
    provider = OpenAIProvider(base_url=f"{os.environ['ORCA']}/v1", api_key="none")
    model = OpenAIResponsesModel("tiny", provider=provider)
    agent = Agent(model, instructions="Be brief", tools=[weather])
    assert (await agent.run("Bern?")).output == "It is 5 degrees in Bern."
    async with agent.run_stream("Bern?") as stream:
        assert await stream.get_output() == "It is 5 degrees in Bern."
    assert (await Agent(model, output_type=NativeOutput(City)).run("Bern?")).output == City(city="Bern")
    print("pydantic-ai", version("pydantic-ai"))


asyncio.run(main())
