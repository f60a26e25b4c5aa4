#!/bin/sh
# onnxruntime-extensions 0.15.2: the lines that hold a chat template's own blocks are line breaks in the prompt.
#
# Guess before: its tokenizer renders a model's chat template to the prompt that transformers makes of it. transformers
# sets jinja2's `trim_blocks` and `lstrip_blocks`: the line break behind a block and the spaces before one stay out of
# the prompt. This renderer keeps both. A template that is written one block a line, without a dash in each, gives
# another prompt for every message, and no error: the model sees line breaks where it was trained on none. Where all
# blocks have dashes the two agree.
#
# Seen with: onnxruntime-extensions 0.15.2, jinja2 3.1.6, Python 3.11, Linux x86-64. Prints both prompts, and fails
# when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check onnxruntime-extensions==0.15.2 jinja2==3.1.6
"$folder/env/bin/python" - "$folder" <<'PYTHON'
import json
import pathlib
import sys

from jinja2.sandbox import ImmutableSandboxedEnvironment
from onnxruntime_extensions import pp_api

folder = pathlib.Path(sys.argv[1])
model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
(folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
(folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
extensions = pp_api.Tokenizer(str(folder))
as_transformers = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

PLAIN = """\
{% for message in messages %}
  {% if message.role == 'user' %}
[user]{{ message.content }}
  {% endif %}
{% endfor %}
[assistant]"""
DASHES = PLAIN.replace("{%", "{%-").replace("%}", "-%}")
CHAT = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
for name, template, *expected in (
    ("blocks without dashes", PLAIN, "[user]one\n[user]two\n[assistant]",
     "\n  \n[user]one\n  \n\n  \n[user]two\n  \n\n[assistant]"),
    ("blocks with dashes", DASHES, "[user]one[user]two[assistant]", "[user]one[user]two[assistant]"),
):
    prompts = [
        as_transformers.from_string(template).render(messages=CHAT),
        extensions.apply_chat_template(json.dumps(CHAT), template=template),
    ]
    print(f"{name}: as transformers {prompts[0]!r}, onnxruntime-extensions {prompts[1]!r}")
    assert prompts == expected
PYTHON
