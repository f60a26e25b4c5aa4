#!/bin/sh
# llguidance 1.9.1: a member that a schema names may come again as another member, spelled with \u, and then be anything.
#
# `"\u0061"` and `"a"` are one name to every reader of JSON. llguidance lets members that the schema does not name have any
# name but those: it compares spellings. So `{"a":1,"\u0061":"x"}` passes where `a` must be an integer, and reads back as `x`.
# In a string as a value, or in an object whose schema names no member, it allows no such escape of a letter at all.
# `"additionalProperties": false` shuts it out, and so does the option `json_allowed_escapes` without `u`.
#
# Seen with: llguidance 1.9.1, jsonschema 4.26.0, Python 3.11, Linux x86-64. Prints what is allowed, and fails when that
# changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check llguidance==1.9.1 jsonschema==4.26.0
"$folder/env/bin/python" - <<'PYTHON'
import json

import jsonschema
from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def allowed(schema, text, **options):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options or None))
    assert not matcher.is_error(), matcher.get_error()
    said = matcher.try_consume_tokens(tokenizer.tokenize_str(text)) == len(text) and matcher.is_accepting()
    fits = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    print(f"{json.dumps(schema):100} {text:22} {'allowed' if said else 'not allowed':12} {'fits' if fits else 'does not fit'}")
    return said, fits


named = {"type": "object", "properties": {"a": {"type": "integer"}}}
assert allowed(named, '{"a":1,"b":"x"}') == (True, True)
assert allowed(named, '{"a":1,"a":"x"}') == (False, False)
assert allowed(named, '{"a":1,"\\u0061":"x"}') == (True, False)
assert allowed({**named, "required": ["a"]}, '{"a":1,"\\u0061":"x"}') == (True, False)
assert allowed({"type": "object", "patternProperties": {"^a$": {"type": "integer"}}}, '{"\\u0061":"x"}') == (True, False)

assert allowed({"type": "object"}, '{"\\u0061":"x"}') == (False, True)
assert allowed(named, '{"b":"\\u0061"}') == (False, True)
assert allowed({**named, "additionalProperties": False}, '{"a":1,"\\u0061":"x"}') == (False, False)
assert allowed(named, '{"a":1,"\\u0061":"x"}', json_allowed_escapes='nrbtf\\"') == (False, False)
PYTHON
