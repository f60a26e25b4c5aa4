"""OpenAI's client for Python: responses whole, parsed, streamed, and a stream taken up behind an event."""

import os

import openai
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{os.environ['ORCA']}/v1", api_key="none", max_retries=0)


class City(BaseModel):
    city: str


assert client.responses.create(model="tiny", input="Bern?").output_text == "It is 5 degrees in Bern."
assert client.responses.parse(model="tiny", input="Bern?", text_format=City).output_parsed == City(city="Bern")
with client.responses.stream(model="tiny", input="Bern?") as stream:
    count = sum(1 for _ in stream)
    final = stream.get_final_response()
with client.responses.stream(response_id=final.id, starting_after=3) as stream:
    assert sum(1 for _ in stream) <= count
    assert stream.get_final_response().output_text == final.output_text
print("openai", openai.__version__)
