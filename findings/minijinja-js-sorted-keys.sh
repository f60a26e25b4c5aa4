#!/bin/sh
# minijinja-js 2.11.0: in a chat template the parameters of a tool come in alphabetical order, and what is undefined
# is null.
#
# Guess before: MiniJinja renders a chat template to one prompt, whether Python or JavaScript calls it, and the keys
# of an object keep their order, which both languages and JSON texts have. Python's binding keeps it. That of
# JavaScript sorts the keys: `tojson` and a loop over `items()` give a tool's parameters in another order than the
# client wrote them, and than transformers has. A model reads another prompt then, and a schema that asks for "reason"
# before "answer" shows them the other way round. A member that is `undefined`, which JSON leaves out, is null in the
# prompt, and a name of the template that is `undefined` counts as defined.
# Orca renders with jinja2: a gateway that counts or hashes prompts with minijinja-js before it asks has other ones.
#
# Seen with: minijinja-js 2.11.0, Node 20.20, minijinja 3.0.5, Python 3.11. Prints what both render, and fails when
# that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check minijinja==3.0.5
npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$folder" minijinja-js@2.11.0
cat > "$folder/render.mjs" <<'NODE'
import assert from "node:assert/strict";
import { Environment } from "minijinja-js/dist/node/minijinja_js.js";

const render = (template, names) => {
  const environment = new Environment();
  environment.enablePyCompat();
  return environment.renderStr(template, names);
};
const [template, names] = process.argv.slice(2);
console.log(render(template, JSON.parse(names)));
assert.equal(render("{{ tool | tojson }}", { tool: { name: "f", strict: undefined } }), '{"name":"f","strict":null}');
assert.equal(render("{{ tools is defined }}", { tools: undefined }), "true");
assert.equal(render("{{ tools is defined }}", {}), "false");
NODE
cat > "$folder/both.py" <<'PYTHON'
import json
import subprocess
import sys

import minijinja

PARAMETERS = {"reason": {"type": "string"}, "answer": {"type": "integer"}}
NAMES = json.dumps({"parameters": PARAMETERS})
for template, expected, other in (
    ("{{ parameters.reason.type }}", "string", "string"),
    (
        "{% for name, value in parameters.items() %}{{ name }}: {{ value.type }}; {% endfor %}",
        "reason: string; answer: integer; ",
        "answer: integer; reason: string; ",
    ),
    ("{{ parameters | tojson }}", PARAMETERS, {name: PARAMETERS[name] for name in ("answer", "reason")}),
):
    python = minijinja.Environment(pycompat=True).render_str(template, **json.loads(NAMES))
    command = ["node", sys.argv[1], template, NAMES]
    javascript = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.removesuffix("\n")
    print(f"{template}\n    Python {python}\n    JavaScript {javascript}")
    if "tojson" in template:  # Their white space differs, too.
        python, javascript = json.loads(python), json.loads(javascript)
        assert [list(python), list(javascript)] == [list(expected), list(other)]
    assert [python, javascript] == [expected, other]
PYTHON
"$folder/env/bin/python" "$folder/both.py" "$folder/render.mjs"
