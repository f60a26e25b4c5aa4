# /// script
# dependencies = ["langchain-ollama==1.1.0"]
# ///
# pyright: reportMissingImports=false
"""LangChain by Ollama's API: a stream, a call of a tool and the turn after it, an answer by a schema."""

import os
from importlib.metadata import version

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langchain_ollama import ChatOllama
from pydantic import BaseModel


def told(city: str) -> str:
    """The weather of a city."""
    return f"5 degrees in {city}"


class City(BaseModel):
    """A city."""

    city: str


weather = StructuredTool.from_function(told, name="weather")
model = ChatOllama(model="tiny", base_url=os.environ["ORCA"])
asked = HumanMessage("Bern?")
assert "".join(chunk.text for chunk in model.stream([asked])) == "It is 5 degrees in Bern."
answer = model.bind_tools([weather]).invoke([asked])
(call,) = answer.tool_calls
assert (call["name"], call["args"]) == ("weather", {"city": "Bern"})
result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
assert model.bind_tools([weather]).invoke([asked, answer, result]).text == "It is 5 degrees in Bern."
assert model.with_structured_output(City).invoke([asked]) == City(city="Bern")
print("langchain-ollama", version("langchain-ollama"))
