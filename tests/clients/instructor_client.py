# /// script
# dependencies = ["instructor==1.17.0"]
# ///
# pyright: reportMissingImports=false
"""Instructor: an object by its default way, which is a tool, whole and in parts, and by a schema."""

import os
from importlib.metadata import version
from typing import Any

import instructor
from openai import OpenAI
from pydantic import BaseModel


class City(BaseModel):
    """A city."""

    city: str


user: Any = {"role": "user", "content": "Bern?"}
asked: Any = {"model": "tiny", "messages": [user], "response_model": City, "max_retries": 0}
openai = OpenAI(base_url=f"{os.environ['ORCA']}/v1", api_key="none", max_retries=0)
client = instructor.from_openai(openai)
assert client.chat.completions.create(**asked).city == "Bern"
*_, last = client.chat.completions.create_partial(**asked)
assert last.city == "Bern"
for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
    assert instructor.from_openai(openai, mode=mode).chat.completions.create(**asked).city == "Bern", mode
asked["messages"] = [{"role": "user", "content": 'Bern? SAY:{"city": "Bern"}:SAY'}]
assert instructor.from_openai(openai, mode=instructor.Mode.JSON).chat.completions.create(**asked).city == "Bern"
print("instructor", version("instructor"))
