# /// script
# dependencies = ["llama-index-llms-openai-like==0.8.1"]
# ///
# pyright: reportMissingImports=false
"""LlamaIndex: a text, a stream, a tool and the turn after it, an answer by a schema."""

import asyncio
import os
from importlib.metadata import version

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

SAID = "It is 5 degrees in Bern."


class City(BaseModel):
    """A city."""

    city: str


def weather(city: str) -> str:
    """The weather of a city."""
    return f"5 degrees in {city}"


model = OpenAILike(
    model="tiny",
    api_base=f"{os.environ['ORCA']}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    max_retries=0,
)
user = ChatMessage(role="user", content="Bern?")
assert model.chat([user]).message.content == SAID
assert "".join(part.delta or "" for part in model.stream_chat([user])) == SAID


async def main() -> None:
    agent = FunctionAgent(tools=[weather], llm=model, system_prompt="Be brief")
    assert str(await agent.run("Bern?")) == SAID


asyncio.run(main())
assert model.as_structured_llm(City).chat([user]).raw == City(city="Bern")
print("llama-index-llms-openai-like", version("llama-index-llms-openai-like"))
