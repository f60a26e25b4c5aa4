#!/bin/sh
# llguidance 1.9.1: a number that must be above 50 and below 50.1 may be 50.
#
# JSON Schema's `exclusiveMinimum` leaves the bound out. llguidance's grammar of numbers does so, but where both bounds have
# the same whole part, a fraction of zeros may follow it, or none: 50 is allowed, and for 0 and 0.5 so is 0. One whole
# number further (50 and 51) the bound is left out again. And a bound of 17 digits may be read as its neighbour: an integer
# of at most 1.9999999999999998 may be 2.
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
    print(f"{json.dumps(schema):90} {text:5} {'allowed' if said else 'not allowed'}")
    return said


def between(low, high):
    return {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}


assert allowed(between(50, 50.1), "50")  # the schema leaves it out
assert allowed(between(0, 0.5), "0")  # and this
assert not allowed(between(50, 52), "50")
assert not allowed(between(50.5, 50.7), "50.5")
assert allowed({"type": "integer", "minimum": 1, "maximum": 1.9999999999999998}, "2")  # and this
PYTHON
