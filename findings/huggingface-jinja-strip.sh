#!/bin/sh
# @huggingface/jinja 0.5.11: `lstrip('\n')` in a chat template cuts all white space, and code loses its first indent.
#
# Guess before: the engine that transformers.js renders chat templates with gives the prompt of jinja2, which they are
# written for. `strip`, `lstrip` and `rstrip` do not look at their argument. Templates in the manner of Qwen3's take an
# earlier answer from behind `</think>` and cut the line breaks: an answer that begins with indented code comes back to
# the model without the indent of its first line, and the prompt is no longer the one that was computed before. `%` of
# a negative number, `==` of two lists and `None` in a text are those of JavaScript, too. Nothing is raised.
#
# Seen with: @huggingface/jinja 0.5.11, Node 20.20, jinja2 3.1.6, Python 3.11. Prints what both render, and fails when
# that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check jinja2==3.1.6
npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$folder" @huggingface/jinja@0.5.11
cat > "$folder/render.mjs" <<'NODE'
import { Template } from "@huggingface/jinja";
const [template, values] = JSON.parse(process.argv[2]);
process.stdout.write(new Template(template).render(values));
NODE
cat > "$folder/both.py" <<'PYTHON'
import json
import subprocess
import sys

from jinja2.sandbox import ImmutableSandboxedEnvironment

ENVIRONMENT = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
VALUES = {"content": "<think>\nIn short.\n</think>\n\n    return x\n", "nothing": None}


def rendered(template):
    command = ["node", sys.argv[1], json.dumps([template, VALUES])]
    node = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return ENVIRONMENT.from_string(template).render(VALUES), node


for template, *expected in (
    (r"{{ content.split('</think>')[-1].strip() }}", "return x", "return x"),
    (r"{{ content.split('</think>')[-1].lstrip('\n') }}", "    return x\n", "return x\n"),
    (r"{{ content.split('</think>')[-1].rstrip('\n') }}", "\n\n    return x", "\n\n    return x"),
    (r"{{ 'a</s>'.rstrip('</s>') }}", "a", "a</s>"),
    (r"{{ -1 % 2 }}", "1", "-1"),
    (r"{{ 'same' if ['a'] == ['a'] else 'other' }}", "same", "other"),
    (r"[{{ nothing }}]", "[None]", "[]"),
):
    both = rendered(template)
    print(f"{template:52} jinja2 {both[0]!r:22} @huggingface/jinja {both[1]!r}")
    assert list(both) == expected
PYTHON
"$folder/env/bin/python" "$folder/both.py" "$folder/render.mjs"
