#!/bin/sh
# onnxruntime-extensions 0.15.2: in a chat template no text is `in` another one, so earlier thoughts stay in the prompt.
#
# Guess before: `'</think>' in content` asks whether the text has the mark, as in Python. Here `in` looks for a member
# of a list or a key of a map, and is false for a text, whatever it has; `not in` is true. Nothing is raised. Templates
# of models that think cut an earlier answer behind its mark where they find it: this renderer does not find it, and
# the thoughts of all turns are sent again, tokens that the model was not trained to see there. `and` gives True in
# place of its right side, and the prompt has that word.
#
# Seen with: onnxruntime-extensions 0.15.2, jinja2 3.1.6, Python 3.11, Linux x86-64. Prints what both render, and fails
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

CHAT = [{"role": "assistant", "content": "<think>Long.</think>Short.", "name": "anna"}]
SHORTENED = """\
{%- for message in messages -%}
{%- if '</think>' in message.content -%}
{{ message.content.split('</think>')[-1] }}
{%- else -%}
{{ message.content }}
{%- endif -%}
{%- endfor -%}"""
for template, *expected in (
    (SHORTENED, "Short.", "<think>Long.</think>Short."),
    ("{{ 'b' in 'abc' }}", "True", "False"),
    ("{{ 'b' not in 'abc' }}", "False", "True"),
    ("{{ 'b' in ['a', 'b'] }}", "True", "True"),
    ("{{ messages[0].role and messages[0].name }}", "anna", "True"),
):
    texts = [
        ImmutableSandboxedEnvironment().from_string(template).render(messages=CHAT),
        extensions.apply_chat_template(json.dumps(CHAT), template=template),
    ]
    print(f"{template}\n    jinja2 {texts[0]!r}, onnxruntime-extensions {texts[1]!r}")
    assert texts == expected
PYTHON
