#!/bin/sh
# llguidance 1.9.1: `additionalItems` beside `prefixItems` makes it forget `prefixItems`, and behind an `allOf` it is itself
# forgotten.
#
# By JSON Schema 2020-12 `additionalItems` is no keyword any more and says nothing; by draft 7 it bounds what follows the
# list in `items`, wherever it stands in the schema. llguidance takes a schema with `additionalItems` as one of an old draft,
# which has no `prefixItems`; and it reads the keywords before and after an `allOf` apart from each other.
#
# Seen with: llguidance 1.9.1, Python 3.11, Linux x86-64. Prints what is allowed, and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check llguidance==1.9.1
"$folder/env/bin/python" - <<'PYTHON'
import json

from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def allowed(schema, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert not matcher.is_error(), matcher.get_error()
    said = matcher.try_consume_tokens(tokenizer.tokenize_str(text)) == len(text) and matcher.is_accepting()
    print(f"{json.dumps(schema):120} {text:8} {'allowed' if said else 'not allowed'}")
    return said


new = {"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "integer"}}
assert not allowed(new, "[5]")
assert allowed({**new, "additionalItems": True}, "[5]")  # the first item is no string
old = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [{"type": "string"}]}
assert not allowed({**old, "additionalItems": False}, '["a",5]')
assert not allowed({**old, "additionalItems": False, "allOf": [True]}, '["a",5]')
assert allowed({**old, "allOf": [True], "additionalItems": False}, '["a",5]')  # the same keywords in another order
PYTHON
