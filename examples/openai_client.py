"""OpenAI's own library against Orca's HTTP door: `python examples/openai_client.py [BASE_URL]`."""

import sys

from openai import OpenAI


def main(base_url: str) -> None:
    client = OpenAI(base_url=base_url, api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    for chunk in client.completions.create(model=model, prompt="import os", max_tokens=16, seed=1, stream=True):
        print(chunk.choices[0].text, end="", flush=True)
    print()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
