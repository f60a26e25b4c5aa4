# /// script
# dependencies = ["langchain-openai==1.7.4"]
# ///
# pyright: reportMissingImports=false
"""LangChain's model of OpenAI: a text, a stream, a tool and the turn after it, and an answer by a schema."""

import os
from importlib.metadata import version

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr


class City(BaseModel):
    """A city."""

    city: str


def told(city: str) -> str:
    """The weather of a city."""
    return f"5 degrees in {city}"


weather = StructuredTool.from_function(told, name="weather")
SAID = "It is 5 degrees in Bern."
model = ChatOpenAI(model="tiny", base_url=f"{os.environ['ORCA']}/v1", api_key=SecretStr("none"), max_retries=0)
assert model.invoke("Bern?").content == SAID
assert "".join(str(chunk.content) for chunk in model.stream("Bern?")) == SAID
asked = HumanMessage("Bern?")
answer = model.bind_tools([weather]).invoke([asked])
(call,) = answer.tool_calls
assert (call["name"], call["args"]) == ("weather", {"city": "Bern"})
result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
assert model.bind_tools([weather]).invoke([asked, answer, result]).content == SAID
assert model.with_structured_output(City).invoke("Bern?") == City(city="Bern")
assert model.with_structured_output(City, method="function_calling").invoke("Bern?") == City(city="Bern")
print("langchain-openai", version("langchain-openai"))
