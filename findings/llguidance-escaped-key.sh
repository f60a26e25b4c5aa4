#!/bin/sh
# llguidance 1.9.1: a property may come a second time as `"gr\u00f6\u00dfe"`, with any value, and replaces the first.
#
# Guess before: a key that is not in `properties` may follow where the schema allows further ones, and a key that is
# may not come twice. The grammar knows a named key by its letters alone, and takes the same key written with escapes
# for another one. To a reader of JSON the two are one key, and what had to be an integer is a string. Models that
# have seen much JSON in ASCII write keys so by themselves. In values such an escape is not allowed, nor in the keys
# of an object without named properties, nor with `"additionalProperties": false`.
#
# Seen with: llguidance 1.9.1, jsonschema 4.26.0, Python 3.11, Linux x86-64. Prints what is allowed, and fails when
# that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check llguidance==1.9.1 jsonschema==4.26.0
"$folder/env/bin/python" - <<'PYTHON'
import json

import jsonschema
from llguidance import LLMatcher, LLTokenizer

TOKENIZER = LLTokenizer("byte")


def allowed(schema, text):
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_json_schema(schema))
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENIZER.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


ONE = {"type": "object", "properties": {"größe": {"type": "integer"}}, "required": ["größe"]}
for schema, text, *expected in (
    (ONE, '{"größe":1}', True, True),
    (ONE, '{"größe":1,"größe":"x"}', False, False),
    (ONE, r'{"größe":1,"gr\u00f6\u00dfe":"x"}', True, False),
    (ONE, r'{"größe":1,"other":"\u00e9"}', False, True),
    ({**ONE, "additionalProperties": False}, r'{"größe":1,"gr\u00f6\u00dfe":"x"}', False, False),
    ({"type": "object"}, r'{"gr\u00f6\u00dfe":"x"}', False, True),
):
    value = json.loads(text)
    found = [allowed(schema, text), jsonschema.Draft202012Validator(schema).is_valid(value)]
    print(f"{text:36} allowed: {found[0]}; as read: {value}, valid: {found[1]}")
    assert found == expected
PYTHON
