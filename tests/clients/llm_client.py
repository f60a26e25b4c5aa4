# /// script
# dependencies = ["llm==0.36"]
# ///
"""The program `llm`: a stream, a text, and an answer by a schema, with a model of its extra-openai-models.yaml."""

import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    model = f"- model_id: orca\n  model_name: tiny\n  api_base: {os.environ['ORCA']}/v1\n  supports_schema: true\n"
    Path(folder, "extra-openai-models.yaml").write_text(model + "  supports_tools: true\n")
    tool = "def weather(city: str) -> str:\n    'The weather of a city.'\n    return '5 degrees'\n"
    asked = [sys.executable, "-m", "llm", "-m", "orca", "Bern?"]

    def said(*more: str) -> str:
        return subprocess.check_output([*asked, *more], text=True, env=os.environ | {"LLM_USER_PATH": folder}).strip()

    assert said() == said("--no-stream") == said("--functions", tool) == "It is 5 degrees in Bern."
    assert said("--schema", "city str") == '{"city": "Bern"}'
print("llm", version("llm"))
