# /// script
# dependencies = ["outlines[openai]==1.3.3"]
# ///
# pyright: reportMissingImports=false
"""Outlines on a server of OpenAI's API and on one that speaks vLLM's forms: a text, a stream, a schema, a choice."""

import os
from importlib.metadata import version
from typing import Literal

import openai
import outlines
from pydantic import BaseModel


class City(BaseModel):
    city: str


SAID = "It is 5 degrees in Bern."
client = openai.OpenAI(base_url=f"{os.environ['ORCA']}/v1", api_key="none", max_retries=0)
for model in (outlines.from_openai(client, "tiny"), outlines.from_vllm(client, "tiny")):
    assert model("Bern?") == SAID
    assert "".join(model.stream("Bern?")) == SAID
    assert City.model_validate_json(model("Bern?", City)) == City(city="Bern")
assert outlines.from_vllm(client, "tiny")("Bern? SAY:warm:SAY", Literal["warm", "cold"]) == "warm"
print("outlines", version("outlines"))
