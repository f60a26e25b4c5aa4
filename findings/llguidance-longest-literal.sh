#!/bin/sh
# llguidance 1.9.1: a literal that begins with `{"` shuts out every object of a `%json` beside it that begins with `{"`.
#
# `start: object | call` should allow what either allows. But once `{"` may be the start of the literal, the object's own
# `{` is given up: of the `%json`, only `{}` and objects with white space after the brace are left. Nothing warns.
# Splitting the literal behind the brace mends most of it: then only a key that the rest of the literal begins with is shut
# out. llguidance's notes on its syntax liken it to Lark's `lexer="dynamic"`; Lark takes all of them, written either way.
#
# Seen with: llguidance 1.9.1, lark 1.3.1, Python 3.11, Linux x86-64. Prints what is allowed, and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check llguidance==1.9.1 lark==1.3.1
"$folder/env/bin/python" - <<'PYTHON'
import lark
from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")
json_object = '%json {"type": "object"}'
spelled_out = '"{" KEY ":" /[0-9]+/ "}"\nKEY: /"[a-z]+"/'
whole, split = r'"{\"name\": \""', r'"{" "\"name\": \""'


def grammar(an_object, literal):
    return f'start: object | call\nobject: {an_object}\ncall: {literal} /[a-z]+/ "\\"}}"\n'


def allowed(text, literal, an_object=json_object):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar(an_object, literal)))
    assert not matcher.is_error(), matcher.get_error()
    said = matcher.try_consume_tokens(tokenizer.tokenize_str(text)) == len(text) and matcher.is_accepting()
    print(f"{an_object.splitlines()[0]:24} {literal:20} {text:16} {'allowed' if said else 'not allowed'}")
    return said


assert not allowed('{"a":1}', whole)  # the `%json` allows it
assert allowed('{ "a":1}', whole)
assert allowed("{}", whole)
assert allowed('{"name": "abc"}', whole)

assert allowed('{"a":1}', split)
assert not allowed('{"name":1}', split)  # the `%json` allows this too

for text in ('{"a":1}', '{"name":1}', '{"name": "abc"}'):
    for literal in (whole, split):
        lark.Lark(grammar(spelled_out, literal), lexer="dynamic").parse(text)  # raises on what does not fit
assert not allowed('{"a":1}', whole, spelled_out)
assert allowed('{"a":1}', split, spelled_out)
assert not allowed('{"name":1}', split, spelled_out)
PYTHON
