#!/bin/sh
# xgrammar 0.2.8: an object that needs an id or a name may be 3, and a text with the pattern of a path has a tab in
# it.
#
# Guess before: what is allowed is valid, or the schema is refused as one that the grammar cannot express; all else is
# warned of. Where a schema has `anyOf`, `type`, `properties`, `required` and `additionalProperties` beside it are
# dropped without a warning: "id or name, one of them is required" allows any JSON. So are keywords beside `$ref`, and
# `not`. A required key that `properties` does not list is not required: {"a": 1} is allowed without "b". And {"b":
# 1}, which is valid, is refused, since one of the listed keys has become required instead. The characters of a
# `pattern` are written as they are, not as JSON writes them: a backslash begins an escape, so that `C:\temp` arrives
# with a tab, and a quotation mark ends the string, so that the answer is no JSON. All of that with `strict_mode` and
# without it. vLLM and SGLang guide their models with xgrammar. Orca does so with llguidance, which allows what is
# valid here, and refuses the schema with `not`.
#
# Seen with: xgrammar 0.2.8, llguidance 1.9.1, jsonschema 4.26.0, Python 3.11, Linux x86-64. Prints what is allowed,
# and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check xgrammar==0.2.8 torch==2.13.0 transformers==5.23.0 \
  llguidance==1.9.1 jsonschema==4.26.0
"$folder/env/bin/python" - <<'PYTHON'
import json

import jsonschema
import xgrammar
from llguidance import LLMatcher, LLTokenizer

END = 256
TOKENS = xgrammar.TokenizerInfo([*(bytes([byte]) for byte in range(256)), b"</s>"], stop_token_ids=[END])
COMPILER = xgrammar.GrammarCompiler(TOKENS)
BYTES = LLTokenizer("byte")


def allowed(schema, text, strict):
    matcher = xgrammar.GrammarMatcher(COMPILER.compile_json_schema(json.dumps(schema), strict_mode=strict))
    return all(matcher.accept_token(token) for token in [*text.encode(), END])


def allowed_by_llguidance(schema, text):
    """None where the schema is refused."""
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_json_schema(schema))
    if matcher.is_error():
        return None
    tokens = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def valid(schema, text):
    """None where the text is no JSON."""
    try:
        return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    except json.JSONDecodeError:
        return None


MEMBERS = {"id": {"type": "integer"}, "name": {"type": "string"}}
OBJECT = {"type": "object", "properties": MEMBERS, "additionalProperties": False}
EITHER = {**OBJECT, "anyOf": [{"required": ["id"]}, {"required": ["name"]}]}
ABOVE = {"$ref": "#/$defs/count", "minimum": 5, "$defs": {"count": {"type": "integer"}}}
OTHER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b"], "additionalProperties": True}
PATH = {"type": "string", "pattern": r"^[A-Z]:\\[a-z]+$"}
INCHES = {"type": "string", "pattern": r'^\d+"$'}
for schema, text, *expected in (
    (OBJECT, "3", False, False, False),
    (EITHER, '{"id": 1}', True, True, True),
    (EITHER, "3", True, False, False),
    (EITHER, "{}", True, False, False),
    (EITHER, '{"id": "x", "more": null}', True, False, False),
    (ABOVE, "3", True, False, False),
    ({"type": "integer", "not": {"const": 3}}, "3", True, None, False),
    (OTHER, '{"a": 1}', True, False, False),
    (OTHER, '{"b": 1}', False, True, True),
    (PATH, r'"C:\temp"', True, False, False),
    (PATH, r'"C:\\temp"', False, True, True),
    (INCHES, '"12""', True, False, None),
    (INCHES, r'"12\""', False, True, True),
):
    found = [allowed(schema, text, True), allowed_by_llguidance(schema, text), valid(schema, text)]
    print(f"{json.dumps(schema)}\n    {text}: xgrammar {found[0]}, llguidance {found[1]}, valid {found[2]}")
    assert found == expected
    assert allowed(schema, text, False) == found[0]
PYTHON
