# /// script
# dependencies = ["openai-agents==0.24.0"]
# ///
# pyright: reportMissingImports=false
"""OpenAI's agents: a tool, streamed or not, and a turn that goes on from a response."""

import asyncio
import os
from importlib.metadata import version

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"5 degrees in {city}"


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{os.environ['ORCA']}/v1", api_key="none", max_retries=0)
    chats = Agent(name="a", instructions="Be brief", model=OpenAIChatCompletionsModel("tiny", client), tools=[weather])
    assert (await Runner.run(chats, "Bern?")).final_output == "It is 5 degrees in Bern."
    agent = Agent(name="a", instructions="Be brief", model=OpenAIResponsesModel("tiny", client), tools=[weather])
    result = await Runner.run(agent, "Bern?")
    assert result.final_output == "It is 5 degrees in Bern."
    assert [type(item).__name__ for item in result.new_items][:2] == ["ToolCallItem", "ToolCallOutputItem"]
    streamed = Runner.run_streamed(agent, "Bern?")
    async for _ in streamed.stream_events():
        pass
    assert streamed.final_output == result.final_output
    assert (await Runner.run(agent, "And?", previous_response_id=result.last_response_id)).final_output
    print("openai-agents", version("openai-agents"))


asyncio.run(main())
