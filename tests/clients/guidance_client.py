# /// script
# dependencies = ["guidance==0.3.1", "openai==3.57.0"]
# ///
# pyright: reportMissingImports=false
"""guidance: a chat with a free text, and one with a schema."""

import json
import os
from importlib.metadata import version

from guidance import assistant, gen, user
from guidance import json as gen_json
from guidance.models import OpenAI
from pydantic import BaseModel

SAID = "It is 5 degrees in Bern."


class City(BaseModel):
    city: str


model = OpenAI("tiny", api_key="none", base_url=f"{os.environ['ORCA']}/v1")
with user():
    asked = model + "Bern?"
with assistant():
    assert (asked + gen(name="said"))["said"] == SAID
    assert json.loads((asked + gen_json(name="said", schema=City))["said"]) == {"city": "Bern"}
print("guidance", version("guidance"))
