# /// script
# dependencies = ["smolagents[openai]==1.26.0"]
# ///
# pyright: reportMissingImports=false
"""smolagents: an agent that calls tools, and one that writes Python."""

import os
from importlib.metadata import version

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return f"5 degrees in {city}"


model = OpenAIModel(model_id="tiny", api_base=f"{os.environ['ORCA']}/v1", api_key="none")
assert ToolCallingAgent(tools=[weather], model=model, max_steps=3).run("Bern?") == "It is 5 degrees in Bern."
code = 'SAY:Thought: it is known.\n<code>\nfinal_answer("5 degrees")\n</code>:SAY'
assert CodeAgent(tools=[], model=model, max_steps=2).run(f"Bern? {code}") == "5 degrees"
assert CodeAgent(tools=[], model=model, max_steps=2, stream_outputs=True).run(f"Bern? {code}") == "5 degrees"
print("smolagents", version("smolagents"))
