# /// script
# dependencies = ["ag2[openai]==1.2.1"]
# ///
# pyright: reportMissingImports=false
"""AG2: an agent with a tool, streamed or not, by chats and by responses, and an answer by a schema."""

import asyncio
import os
from importlib.metadata import version

from ag2 import Agent
from ag2.config import OpenAIConfig, OpenAIResponsesConfig
from pydantic import BaseModel


class City(BaseModel):
    city: str


def weather(city: str) -> str:
    """The weather of a city."""
    return f"5 degrees in {city}"


async def main() -> None:
    for kind in (OpenAIConfig, OpenAIResponsesConfig):
        for streaming in (False, True):
            address = f"{os.environ['ORCA']}/v1"
            config = kind(model="tiny", base_url=address, api_key="none", max_retries=0, streaming=streaming)
            agent = Agent("a", "Be brief", config=config, tools=[weather])
            assert (await agent.ask("Bern?")).body == "It is 5 degrees in Bern."
            assert await (await Agent("a", config=config, response_schema=City).ask("Bern?")).content() == City(
                city="Bern"
            )
    print("ag2", version("ag2"))


asyncio.run(main())
