#!/bin/sh
# outlines-core 0.2.14: a string with the pattern `yes|no` can be neither "yes" nor "no".
#
# Guess before: a string's pattern stands for itself within the quotes. It is put between them as it is, `"yes|no"`,
# where the bar splits the quotes from each other, so that no string is left. In a group, as `(yes|no)`, it is right.
# `^` and `$` are taken off where both are there. Alone, as in `^https://`, the `^` stays behind the quote, where
# nothing begins: the index is refused, with an error that blames the vocabulary. And a pattern says, by the standard,
# what a string has somewhere in it; here it is all of the string. llguidance takes all of these as the standard says.
#
# Seen with: outlines-core 0.2.14, llguidance 1.9.1, jsonschema 4.26.0, Python 3.11, Linux x86-64. Prints what is
# allowed, and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check \
    outlines-core==0.2.14 llguidance==1.9.1 jsonschema==4.26.0
"$folder/env/bin/python" - <<'PYTHON'
import json

import jsonschema
from llguidance import LLMatcher, LLTokenizer
from outlines_core import Guide, Index, Vocabulary
from outlines_core.json_schema import build_regex_from_schema

END = 128
ASCII = Vocabulary(END, {chr(code): [code] for code in range(32, 127)})
TOKENIZER = LLTokenizer("byte")


def outlines(schema, text):
    try:
        guide = Guide(Index(build_regex_from_schema(schema), ASCII))
    except ValueError as error:
        return str(error).partition(" with the regex")[0]
    for code in text.encode():
        if code not in guide.get_tokens():
            return False
        guide.advance(code)
    return guide.is_finished() or END in guide.get_tokens()


def llguidance(schema, text):
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_json_schema(schema))
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(TOKENIZER.tokenize_str(text)) == len(text) and matcher.is_accepting()


REFUSED = "The vocabulary provided is incompatible"
for pattern, text, found in (
    ("(yes|no)", '"yes"', True),
    ("yes|no", '"yes"', False),
    ("yes|no", '"no"', False),
    ("^https://.*$", '"https://a"', True),
    ("^https://.*", '"https://a"', REFUSED),
    ("[0-9]", '"a1"', False),
):
    schema = {"type": "string", "pattern": pattern}
    jsonschema.validate(json.loads(text), schema)
    said = outlines(json.dumps(schema), text)
    print(f"{pattern:12} {text:11} is valid; outlines-core: {said}")
    assert llguidance(json.dumps(schema), text)
    assert said == found
PYTHON
