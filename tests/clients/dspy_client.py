# /// script
# dependencies = ["dspy==3.4.1"]
# ///
# pyright: reportMissingImports=false
"""DSPy: a prediction in its default form, one as JSON."""

import os
from importlib.metadata import version

import dspy

model = dspy.LM(
    "openai/tiny", api_base=f"{os.environ['ORCA']}/v1", api_key="none", cache=False, num_retries=0, max_tokens=200
)
dspy.configure(lm=model)
said = "[[ ## answer ## ]]\n5 degrees\n\n[[ ## completed ## ]]"
assert dspy.Predict("question -> answer")(question=f"Bern? SAY:{said}:SAY").answer == "5 degrees"
dspy.configure(lm=model, adapter=dspy.JSONAdapter())
assert dspy.Predict("question -> city")(question='Bern? SAY:{"city": "Bern"}:SAY').city == "Bern"
print("dspy", version("dspy"))
