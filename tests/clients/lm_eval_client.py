# /// script
# dependencies = ["lm-eval[api]==0.4.13"]
# ///
# pyright: reportMissingImports=false
"""lm-evaluation-harness: a task of choices, which it scores by the loglikelihoods of prompts, and one of texts."""

import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

import lm_eval

URL = os.environ["ORCA"]
CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: [" yes", " no"]
metric_list: [{metric: acc}]
"""
TEXTS = """
task: texts
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/rows.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "It is 5 degrees in Bern."
generation_kwargs: {until: ["\\n"], max_gen_toks: 64}
metric_list: [{metric: exact_match}]
"""

with tempfile.TemporaryDirectory() as folder:
    rows = ({"question": f"Is it {n} degrees?", "answer": n % 2} for n in range(4))
    Path(folder, "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in (("choices", CHOICES), ("texts", TEXTS)):
        Path(folder, f"{name}.yaml").write_text(task.replace("FOLDER", folder))
    done = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={"model": "tiny", "base_url": f"{URL}/v1/completions", "tokenizer_backend": "remote"},
        tasks=["choices", "texts"],
        task_manager=lm_eval.tasks.TaskManager(include_path=folder, include_defaults=False),
    )
assert done is not None
results = done["results"]
assert results["choices"]["acc,none"] in {0.0, 0.5, 1.0}
assert results["texts"]["exact_match,none"] == 1.0, results
print("lm-eval", version("lm-eval"))
