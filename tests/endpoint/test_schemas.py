"""Answers by JSON schemas are what the schemas describe: those that are kept are kept whole, others refused by name."""

import json
import os
import random
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from decimal import localcontext
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import numpy as np
import pytest
from checkpoints import make_gpt2, make_tokenizer
from endpoint.any_schemas import SPELLED, a_schema, number, spelled, strings_in, validator, ways
from properties import covering, examples

from orca_common.checkpoint import read_checkpoint
from orca_common.forms import Forms
from orca_endpoint.requests.answering import Answer
from orca_endpoint.requests.form_compiler import Question, compiled, without
from orca_endpoint.requests.schemas.kept import FORMATS
from orca_endpoint.requests.schemas.kept import MOMENTS as MOMENTS_OF_RFC3339

LONGEST = 300  # tokens of a random answer
LIKELY = frozenset(b'"{}[],:0123456789.-eE ab1kindxy\\u0061T/@')
# Tokens that reach over the ends of names and into escapes, as those of real vocabularies do.
JOINED = [
    *('{"', '"}', '":', '": ', '","', '", "', "[{", "}]", '"a"', '"a":', 'a"', '"kind": "', "größe", "ö", "😀"),
    *('\\"', "\\\\", "\\n", '\\"":', "\\/", "\\u", "\\u00", "\\u0061", '"\\u0061"', "\\ud83d", "0061", '61":'),
]


class Words(NamedTuple):
    """The forms of a model, and the bytes of its tokens; the one behind them ends an answer."""

    forms: Forms
    texts: list[bytes]


def words_of(folder: Path, pieces: list[str]) -> Words:
    """A vocabulary of the bytes, of pieces, and of an end."""
    tokenizer = make_tokenizer(["</s>"], pieces)
    end = tokenizer.get_vocab_size() - 1
    make_gpt2(folder, heads=1, layers=1, hidden=4, vocab=end + 1, positions=16, seed=1, eos_token_id=end)
    tokenizer.save(str(folder / "tokenizer.json"))
    forms = Forms(read_checkpoint(folder))
    forms.open()
    assert forms._tokenizer is not None
    return Words(forms, [forms._tokenizer.decode_bytes([i]) for i in range(end)])


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Forms:
    """The forms of a model whose tokens are the bytes, and an end."""
    return words_of(tmp_path_factory.mktemp("model"), []).forms


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def words(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Words:
    return words_of(tmp_path_factory.mktemp("model"), JOINED if request.param == "pieces" else [])


def asked(forms: Forms, schema: str, *, loose: bool = False) -> Answer:
    """The outcome of a schema, for a caller who is strict, or not."""
    question: Question = {"kind": "json_schema", "loose": loose, "bare": False, "syntax": "", "schema": None}
    return compiled(forms, question, schema.encode())


# -- random schemas


def an_answer(draw: random.Random, words: Words, grammar: str, tried: list[str], counts: Counter[str]) -> bytes | None:
    """Returns an answer of random weights, which like the marks of JSON; None: it did not end in time.

    tried: strings that the answer tries to spell, in all ways that JSON has.
    """
    forms, texts = words
    matcher, said, wish, begun = forms.matcher(grammar), b"", b"", False
    likely = {i for i, text in enumerate(texts) if LIKELY.issuperset(text)}
    closing = {i for i, text in enumerate(texts) if set(b'"]}0').issuperset(text)}
    for n in range(LONGEST):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        assert not matcher.is_error(), (said, matcher.get_error())
        allowed = np.unpackbits(bits, count=len(texts) + 1, bitorder="little").nonzero()[0].tolist()
        assert allowed, said
        if not wish and tried and n < LONGEST / 2 and draw.random() < 0.5:
            wish, begun = spelled(draw, draw.choice(tried)), False
        wanted = [i for i in allowed if i < len(texts) and wish.startswith(texts[i])] if wish else []
        counts["refused spellings"] += bool(wish and begun and not wanted)
        preferred = [i for i in allowed if i == len(texts) or i in (likely if n < LONGEST / 2 else closing)]
        token = draw.choice(wanted or (preferred if preferred and draw.random() < 0.9 else allowed))
        wish, begun = wish[len(texts[token]) :] if wanted else b"", bool(wanted)
        if token == len(texts):
            return said
        assert matcher.consume_tokens([token])
        said += texts[token]
        if matcher.is_stopped():
            return said
    return None


def first(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object as parsers read it that take the first value of a name; most take the last."""
    return dict(reversed(pairs))


def rounds(words: Words, seeds: range) -> Counter[str]:
    """Counts what became of a schema of each seed, and of three answers to each that is kept, whole or in part."""
    counts = Counter[str]()
    for seed in seeds:
        draw = random.Random(seed)
        schema = a_schema(draw)
        outcome = asked(words.forms, schema)
        whole = "grammar" in outcome
        counts["kept" if whole else "refused"] += 1
        if not whole:
            said = f"{outcome['place']}: {outcome['problem']}"
            assert NAMED.search(said) or schema == "false", (seed, schema, said)
            outcome = asked(words.forms, schema, loose=True)
        left_out = [place for _, place in outcome.get("left_out", [])]
        assert bool(left_out) != whole or "problem" in outcome, (seed, schema, outcome)
        counts["relaxed"] += bool(left_out)
        if "problem" in outcome or "" in left_out:
            continue
        validate, tried = validator(schema, left_out), [*strings_in(json.loads(schema))]
        for _ in range(3):
            answer = an_answer(draw, words, outcome["grammar"], tried, counts)
            if answer is None:
                counts["long"] += 1
                continue
            with localcontext() as context:
                context.prec = 4000  # numbers of many long tokens
                try:
                    for pairs in (dict, first):
                        validate(json.loads(answer, parse_float=number, object_pairs_hook=pairs))
                except (jsonschema.ValidationError, ValueError) as error:
                    raise AssertionError((seed, schema, left_out, answer, str(error)[:300])) from None
            counts["valid" if whole else "valid in part"] += 1
    return counts


# Keywords of JSON Schema, as a refusal names them.
NAMED = re.compile(
    r"\b(type|const|enum|allOf|anyOf|oneOf|ref|items|prefixItems|additionalItems|minItems|maxItems|properties|required"
    r"|additionalProperties|patternPropert(y|ies)|minProperties|maxProperties|minLength|maxLength|pattern|format"
    r"|minimum|maximum|exclusiveMinimum|exclusiveMaximum|multipleOf|not|if|then|else|contains|minContains|uniqueItems"
    r"|propertyNames|dynamicRef|unevaluated(Properties|Items)|dependentRequired|dependentSchemas|dependencies)\b"
)


# Python's warnings about classes that another release may read in another way: today it reads them as ECMA-262 does.
WARNINGS = pytest.mark.filterwarnings("ignore:Possible (set|nested)")


def half(words: Words, seeds: range) -> range:
    """The seeds of one vocabulary; those of the other are the rest."""
    middle = len(seeds) // 2
    return seeds[:middle] if len(words.texts) == 256 else seeds[middle:]


@WARNINGS
def test_random_answers_are_valid_by_a_second_validator(words: Words) -> None:
    """The second one is jsonschema 4.26. Answers try other spellings of names and constants, too."""
    counts = rounds(words, half(words, range(examples(1600))))
    assert counts["valid"] > examples(1000), counts
    assert counts["valid in part"] > examples(400), counts
    assert counts["refused"] > examples(120), counts
    assert counts["relaxed"] > counts["refused"] * 0.7, counts  # others are wrong
    assert counts["refused spellings"] > examples(600), counts


@WARNINGS
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_random_answers_to_many_schemas(words: Words) -> None:
    """SCHEMAS of the environment says how many."""
    many = int(os.environ.get("SCHEMAS", "5000"))
    counts = rounds(words, half(words, range(1000, 1000 + many)))
    print(counts)
    assert counts["valid"] > 0.4 * many, counts


# -- names and strings have one spelling


def others(text: str) -> list[str]:
    """Spellings of a text in JSON beside the shortest one: all of it in another way, or its first character alone."""
    all_of_it = {"".join(ways(one)[:n][-1] for one in text) for n in (2, 3, 4)}
    return sorted(f'"{one}"' for one in {*all_of_it, *(way + shortest(text[1:])[1:-1] for way in ways(text[0])[1:])})


def shortest(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def only(text: str) -> str:
    """The pattern of one text."""
    return "^" + "".join(f"\\u{{{ord(one):x}}}" for one in text) + "$"


def accepts(words: Words, grammar: str, answer: str) -> bool:
    """Whether the tokens of a text are an answer."""
    assert words.forms._tokenizer is not None
    matcher, ids = words.forms.matcher(grammar), words.forms._tokenizer.tokenize_str(answer)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


TEXT, COUNT = {"type": "string"}, {"type": "integer"}
# Objects that may have a member of a name, which is a string, and a member "other", which is a number.
OBJECTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "absent": lambda name: {"properties": {name: TEXT}},
    "true": lambda name: {"properties": {name: TEXT}, "additionalProperties": True},
    "a schema": lambda name: {"properties": {name: TEXT}, "additionalProperties": COUNT},
    "required": lambda name: {"properties": {name: TEXT}, "required": [name]},
    "counted": lambda name: {"properties": {name: TEXT}, "required": [name], "minProperties": 2, "maxProperties": 3},
    "a pattern": lambda name: {"patternProperties": {only(name): TEXT}},
    "a pattern, too": lambda name: {"properties": {name: {"minLength": 1}}, "patternProperties": {only(name): TEXT}},
    "another pattern": lambda name: {"properties": {name: TEXT}, "patternProperties": {"^other$": COUNT}},
    "two schemas": lambda name: {"properties": {name: {"minLength": 1}}, "allOf": [{"properties": {name: TEXT}}]},
    "a choice": lambda name: {"anyOf": [{"properties": {name: TEXT, "z": {}}}, {"properties": {name: TEXT}}]},
}
# Schemas of such an object and of what is around it, and an answer in which one stands.
AROUND: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "nothing": (lambda one: one, "%s"),
    "a member": (lambda one: {"type": "object", "properties": {"o": one}}, '{"o": %s}'),
    "a dictionary": (lambda one: {"type": "object", "additionalProperties": one}, '{"k": %s}'),
    "a list": (lambda one: {"type": "array", "items": one}, "[%s]"),
    "a union": (lambda one: {"anyOf": [{"type": "null"}, one]}, "%s"),
    "a reference": (lambda one: {"$ref": "#/$defs/one", "$defs": {"one": one}}, "%s"),
    "references": (
        lambda one: {
            "type": "object",
            "properties": {"o": {"$ref": "#/$defs/one"}, "p": {"$ref": "#/$defs/one"}},
            "$defs": {"one": one},
        },
        '{"o": {}, "p": %s}',
    ),
    "white space": (lambda one: {**one, "x-guidance": {"whitespace_flexible": True}}, "%s"),
}


def test_a_member_has_one_spelling(words: Words) -> None:
    """No spelling of its name is that of a member beside it, whose value need not follow its schema."""
    for around, kind, name in covering([*AROUND], [*OBJECTS], SPELLED):
        surround, outside = AROUND[around]
        inside, key = OBJECTS[kind](name), shortest(name)
        if "required" in inside and "{}" in outside:
            outside = outside.replace("{}", f'{{{key}: "x", "other": 5}}')
        answer = asked(words.forms, json.dumps(surround({"type": "object", **inside})))
        assert "grammar" in answer, (around, kind, name, answer)
        right = [f'{{{key}: "x", "other": 5}}', *(["{}", '{"other": 5}'] if "required" not in inside else [])]
        wrong = [f"{{{key}: 5}}", f'{{{key}: "x", {key}: 5}}']
        wrong += [f"{{{before}{one}: 5}}" for one in others(name) for before in ("", '"other": 5, ', f'{key}: "x", ')]
        for said in right:
            assert accepts(words, answer["grammar"], outside % said), (around, kind, said)
        for said in wrong:
            assert not accepts(words, answer["grammar"], outside % said), (around, kind, said)


def test_a_string_has_one_spelling(words: Words) -> None:
    """The shortest one, whatever its schema says of its characters."""
    for text in SPELLED:
        count = {"minLength": len(text), "maxLength": len(text)}
        bound = [{"const": text}, {"enum": [5, text]}, {"pattern": only(text)}, count, {**count, "pattern": only(text)}]
        for schema in [{}, *({"type": "string", **one} for one in bound)]:
            grammar = asked(words.forms, json.dumps(schema))["grammar"]
            assert accepts(words, grammar, shortest(text)), (schema, text)
            assert not any(accepts(words, grammar, one) for one in others(text)), (schema, text)
            assert accepts(words, grammar, shortest(text + "/")) == (not schema), (schema, text)


# -- what llguidance 1.9.1 does not keep by itself


def follows(forms: Forms, schema: str, answer: str, *, loose: bool = False) -> bool:
    """Whether an answer is one of a schema."""
    outcome = asked(forms, schema, loose=loose)
    assert "grammar" in outcome, outcome
    assert forms._tokenizer is not None
    matcher, ids = forms.matcher(outcome["grammar"]), forms._tokenizer.tokenize_str(answer)
    return matcher.try_consume_tokens(ids) == len(answer.encode()) and matcher.is_accepting()


OPEN = '{"type": "object", "properties": {"a": {"type": "string"}}'
CAT = (
    '{"type": "object", "properties": {"kind": {"const": "cat"}, "of": {"$ref": "#/$defs/pet"}}, "required": ["kind"]}'
)
DOG = '{"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]}'
PETS = (
    f'{{"$ref": "#/$defs/pet", "$defs": {{"cat": {CAT}, "dog": {DOG},'
    ' "pet": {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]}}}'
)
KEPT = {  # a schema, an answer that fits it, and one that does not
    "constant": ('{"const": 5.0}', "5", "5.1"),
    "int64, low": (
        '{"type": "integer", "minimum": -9223372036854775808, "maximum": 9223372036854775807}',
        "-9223372036854774784",
        "-9223372036854775809",
    ),
    "int64, high": (
        '{"type": "integer", "maximum": 9223372036854775807}',
        "9223372036854774784",
        "9223372036854775808",
    ),
    "a bound that is no double": (
        '{"type": "integer", "maximum": 9007199254740993}',
        "9007199254740992",
        "9007199254740994",
    ),
    "above a large number": (
        '{"type": "integer", "exclusiveMinimum": 9007199254740993}',
        "9007199254740996",
        "9007199254740993",
    ),
    "above a whole number": ('{"exclusiveMinimum": 50, "exclusiveMaximum": 50.1, "type": "number"}', "50.05", "50"),
    "above 0": ('{"exclusiveMinimum": 0, "exclusiveMaximum": 0.5, "type": "number"}', "0.001", "0"),
    "below 0": ('{"exclusiveMinimum": -1, "exclusiveMaximum": 0, "type": "number"}', "-0.5", "-0"),
    "two bounds": ('{"exclusiveMinimum": 0, "minimum": 0.5, "maximum": 0.9, "type": "number"}', "0.6", "0.1"),
    "draft 4": ('{"exclusiveMinimum": true, "anyOf": [true], "minimum": 5, "type": "number"}', "5.5", "5"),
    "an escaped member": (OPEN + "}", '{"b": 5}', '{"\\u0061": 5}'),
    "a member of a pattern": (
        OPEN + ', "patternProperties": {"^a": {"maxLength": 1}}}',
        '{"a": "x", "a1": 5}',
        '{"a": "xy"}',
    ),
    "a member twice": (OPEN + ', "patternProperties": {"^a": {"maxLength": 1}}}', '{"a": "x"}', '{"a": "x", "a": "y"}'),
    "29 February": ('{"type": "string", "format": "date"}', '"2024-02-29"', '"2023-02-29"'),
    "a century": ('{"type": "string", "format": "date"}', '"2000-02-29"', '"1900-02-29"'),
    "a moment": (
        '{"type": "string", "format": "date-time"}',
        '"2024-02-29T23:59:59.5+01:00"',
        '"2023-02-29T23:59:59Z"',
    ),
    "no second": ('{"type": "string", "format": "time"}', '"12:00:59Z"', '"12:00:60Z"'),
    "no string": ('{"format": "date"}', "[1]", '"2023-02-29"'),
    "a day and a pattern": ('{"type": "string", "format": "date", "pattern": "-02-"}', '"2024-02-01"', '"2024-03-01"'),
    "a long host": ('{"type": "string", "format": "hostname"}', '"a.b"', f'"{"a." * 127}"'),
    "POSIX": ('{"type": "string", "pattern": "^[[:alpha:]]$"}', '"l]"', '"x"'),
    "sets": ('{"type": "string", "pattern": "^[a-z&&[^x]]$"}', '"&]"', '"y"'),
    "punctuation": ('{"type": "string", "pattern": "^[!-/:-@[-`{-~]+$"}', '"[~!"', '"a"'),
    "space": (r'{"type": "string", "pattern": "^\\s$"}', '"\ufeff"', '"\x85"'),
    "groups": ('{"type": "string", "pattern": "^(a|(?:b)(?<n>c))$"}', '"bc"', '"b"'),
    "any": ('{"type": "string", "pattern": "^.$"}', '"\x85"', '"\u2028"'),
    "a word": (r'{"type": "string", "pattern": "^[\\w-.]$"}', '"-"', '"ж"'),
    "union by references": (PETS, '{"kind": "cat", "of": {"kind": "dog"}}', '{"kind": "cat", "of": {"kind": "cow"}}'),
    "beside a reference, in draft 7": (
        '{"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a", "maxLength": 1,'
        ' "definitions": {"a": {"type": "string"}}}',
        '"xy"',
        "5",
    ),
    "beside a reference, in later drafts": (
        '{"$ref": "#/$defs/a", "maxLength": 1, "$defs": {"a": {"type": "string"}}}',
        '"x"',
        '"xy"',
    ),
    "prefixItems": (
        '{"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "integer"}, "additionalItems": true}',
        "[null, 5]",
        "[5]",
    ),
    "additionalItems": (
        '{"type": "array", "items": [{"type": "null"}], "allOf": [true], "additionalItems": false}',
        "[null]",
        "[null, 5]",
    ),
    "compact": ('{"type": "array", "x-guidance": {"whitespace_flexible": false}}', "[1,2]", "[1, 2]"),
    "true": ("true", "[1, 2]", "[1,, 2]"),
    "multiples and bounds of other values": (
        '{"prefixItems": [{"multipleOf": 70001}, {"multipleOf": 70000}, {"maximum": 100000000000000002}]}',
        "[140002, 70000, 5]",
        "[140002, 70001]",
    ),
    "a multiple beside a long zero": ('{"multipleOf": 70000, "minimum": 0e5}', "140000", "-70000"),
    "3.0 characters": ('{"type": "string", "maxLength": 3.0}', '"abc"', '"abcd"'),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_by_another_spelling(forms: Forms, name: str) -> None:
    schema, fits, wrong = KEPT[name]
    assert follows(forms, schema, fits)
    assert not follows(forms, schema, wrong)


DEFAULTS = """{"oneOf": [
 {"type": "object", "properties": {"kind": {"const": "cat", "default": "cat"}}},
 {"type": "object", "properties": {"kind": {"const": "dog", "default": "dog"}}}]}"""
REFUSED = {  # a schema, the place of the keyword, and what is said of it
    "2^53 + 1": ('{"const": 9007199254740993}', ".const", "no double is: the next one is 9007199254740992"),
    "2^64 - 1": ('{"enum": [1, 18446744073709551615]}', ".enum[1]", "numbers from -9223372036854774784 to"),
    "digits": ('{"properties": {"a": {"const": 0.12345678901234567}}}', ".properties.a.const", "too many digits"),
    "far": ('{"items": {"minimum": 100000000000000000000}}', ".items.minimum", "from -2^63 to below 10^18"),
    "uint64": ('{"maximum": 18446744073709551615}', ".maximum", "from above -10^18 to 2^63 can be enforced"),
    "too large for any double": ('{"maximum": 1e400}', ".maximum", "is 1E+400"),
    "multiples": ('{"multipleOf": 0.07}', ".multipleOf", "is 0.07, which has too many digits"),
    "common multiples": (
        '{"allOf": [{"multipleOf": 70001}, {"multipleOf": 70000}]}',
        ".allOf[1].multipleOf",
        "too many digits in common",
    ),
    "a multiple within long bounds": (
        '{"multipleOf": 70000, "maximum": 100000000000000002}',
        ".multipleOf",
        "is 70000 beside long bounds, or other multiples, of the same value",
    ),
    "a multiple within bounds elsewhere": (
        '{"multipleOf": 70000, "anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"minimum": -100000000000000002}}}',
        ".multipleOf",
        "is 70000 beside long bounds",
    ),
    "multiples within bounds": (
        '{"allOf": [{"multipleOf": 300}, {"multipleOf": 7000}, {"maximum": 123456789}]}',
        ".allOf[1].multipleOf",
        "is 7000 beside long bounds",
    ),
    "a bound beside a multiple": ('{"multipleOf": 2, "minimum": "1"}', ".minimum", "must be a number"),
    "of nothing": ('{"multipleOf": 0}', ".multipleOf", "must be above 0"),
    "names twice": ('{"minProperties": 2}', ".minProperties", "names may come twice"),
    "look-around": ('{"pattern": "^(?=a)"}', ".pattern", "look-around cannot be followed"),
    "no character": (r'{"pattern": "^\\u{110000}$"}', ".pattern", "U+110000 is no character"),
    "flags": ('{"patternProperties": {"(?i)a": true}}', ".patternProperties.(?i)a", "no group of ECMA-262"),
    "an anchor inside": ('{"type": "string", "pattern": "a^b"}', ".pattern", "^ and $"),
    "an unsayable text": ('{"const": {"a": ["\\u0000"]}}', ".const.a[0]", "holds U+0000, which answers cannot"),
    "half a character": ('{"enum": ["\\ud800"]}', ".enum[0]", "holds U+D800"),
    "not": ('{"properties": {"not": {"not": {}}}}', ".properties.not.not", "cannot be enforced"),
    "an older keyword": ('{"dependencies": {"a": ["b"]}}', ".dependencies", "cannot be enforced"),
    "a union by default": (DEFAULTS, ".oneOf", "write anyOf, or give each schema a property that is in its required"),
    "a union in a definition": (
        '{"properties": {"a": {"anyOf": [{"$ref": "#/$defs/u"}, {"type": "null"}]}}, "$defs": {"u": ' + DEFAULTS + "}}",
        ".$defs.u.oneOf",
        "write anyOf",
    ),
    "elsewhere": ('{"$ref": "https://example.org/a"}', ".$ref", "must begin with #"),
    "nowhere": ('{"$ref": "#/$defs/a"}', ".$ref", "which is not there"),
    "a circle": ('{"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}', ".$defs.a.$ref", "back"),
    "an empty union": ('{"type": "null", "enum": [1]}', ".enum", "incompatible types"),
    "leniency": ('{"x-guidance": {"lenient": true}}', ".x-guidance.lenient", "whitespace_pattern and"),
    "white space": ('{"x-guidance": {"whitespace_pattern": "x"}}', ".x-guidance.whitespace_pattern", "JSON's white"),
    "no answer": ("false", "", "no answer fits it"),
    "NaN": ('{"const": NaN}', "", "NaN is no value of JSON"),
    "an exponent": ('{"const": 1e-5000}', "", "exponent"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_by_its_keyword(forms: Forms, name: str) -> None:
    schema, place, problem = REFUSED[name]
    outcome = asked(forms, schema)
    assert outcome.get("place") == place, outcome
    assert problem in outcome["problem"]


NOTHING = {  # that a schema demands
    "unique items": '{"uniqueItems": false}',
    "a count of nothing": '{"minContains": 0, "maxContains": 5}',
    "none that it contains": '{"contains": {"type": "null"}, "minContains": 0}',
    "dependencies": '{"dependentRequired": {}, "dependentSchemas": {"a": true}, "dependencies": {"a": []}}',
    "the rest": '{"unevaluatedProperties": true, "unevaluatedItems": {}}',
    "names": '{"propertyNames": {"type": "string", "title": "A"}}',
    "no": '{"not": false}',
    "a condition alone": '{"if": {"type": "null"}}',
    "without a condition": '{"then": false, "else": false}',
    "a dialect inside": '{"items": {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://a.b/c"}}',
    "an unknown format": '{"type": "string", "format": "iban"}',
    "a format that few know": '{"type": "string", "format": "json-pointer"}',
}


@pytest.mark.parametrize("name", NOTHING)
def test_what_demands_nothing_is_kept(forms: Forms, name: str) -> None:
    """For a strict caller, too."""
    outcome = asked(forms, NOTHING[name])
    assert outcome.get("left_out") == [], outcome
    for answer in ('"a"', "[1, 1]", '{"a": 1}') if "format" not in name else ('"a"',):
        assert follows(forms, NOTHING[name], answer)


# A schema, what is left out of it, an answer that is still refused, and one that the keyword would refuse.
RELAXED = {
    "names": ('{"propertyNames": {"maxLength": 1}, "type": "object"}', [".propertyNames"], "1", '{"ab": 1}'),
    "inside": (
        '{"properties": {"a": {"type": "array", "items": {"type": "null"}, "uniqueItems": true}}}',
        [".properties.a.uniqueItems"],
        '{"a": [1]}',
        '{"a": [null, null]}',
    ),
    "a condition": ('{"type": "integer", "if": {}, "then": {"maximum": 5}}', [".if"], '"a"', "6"),
    "a definition": (
        '{"$ref": "#/$defs/a", "$defs": {"a": {"type": "string", "pattern": "^(?=a)"}}}',
        [".$defs.a.pattern"],
        "1",
        '"b"',
    ),
    "elsewhere": ('{"type": "null", "$ref": "https://example.org/a"}', [".$ref"], "1", "null"),
    "a union": (
        '{"oneOf": [{"type": "integer"}, {"type": "number"}]}',
        [".oneOf"],
        '"a"',
        "1",
    ),
    "some constants": ('{"enum": [1, 18446744073709551615]}', [".enum[1]"], "2", "1"),
    "no constants": ('{"type": "string", "enum": ["\\u0000"]}', [".enum[0]", ".enum"], "1", '"a"'),
    "a member's pattern": (
        '{"type": "object", "patternProperties": {"(?i)a": {"type": "null"}}, "additionalProperties": false}',
        [".patternProperties.(?i)a", ".additionalProperties"],
        "1",
        '{"B": 1}',
    ),
    "many members": (
        '{"type": "object", "minProperties": 3, "required": ["a"]}',
        [".minProperties"],
        "{}",
        '{"a": 1, "b": 1}',
    ),
    "an unsayable member": (
        '{"type": "object", "properties": {"\\u0000": {}, "a": {"type": "null"}}, "required": ["\\u0000", "a"]}',
        [".properties.\0", ".required[0]"],
        '{"a": 1}',
        '{"a": null}',
    ),
    "digits": ('{"type": "number", "multipleOf": 0.07}', [".multipleOf"], '"a"', "0.1"),
    "digits together": (
        '{"type": "integer", "allOf": [{"multipleOf": 70001}, {"multipleOf": 70000}]}',
        [".allOf[1].multipleOf"],
        "5",
        "70001",
    ),
    "a circle": (
        '{"$ref": "#/$defs/a", "$defs": {"a": {"type": "null", "allOf": [{"$ref": "#/$defs/a"}]}}}',
        [""],
        "",
        "1",
    ),
    "no answer": ('{"type": "null", "enum": [1]}', [".enum"], "1", "null"),
    "an identity inside": (
        '{"type": "object", "properties": {"a": {"$id": "https://a.b/c", "$ref": "#/$defs/d"}}}',
        [".properties.a.$id"],
        "1",
        '{"a": 1}',
    ),
}


@pytest.mark.parametrize("name", RELAXED)
def test_what_is_left_out_for_a_caller_who_is_not_strict(forms: Forms, name: str) -> None:
    """The rest of the schema is kept, and the outcome names each place."""
    schema, places, wrong, wider = RELAXED[name]
    assert "problem" in asked(forms, schema)
    outcome = asked(forms, schema, loose=True)
    assert [place for _, place in outcome.get("left_out", [])] == places, outcome
    assert follows(forms, schema, wider, loose=True)
    assert not follows(forms, schema, wrong, loose=True)


WRONG = ['{"type": "float"}', '{"minLength": -1}', '{"properties": []}', '{"format": 5}', '{"multipleOf": 0}', "false"]


@pytest.mark.parametrize("schema", WRONG)
def test_what_is_wrong_is_refused_for_all(forms: Forms, schema: str) -> None:
    assert "problem" in asked(forms, schema, loose=True)


def test_a_schema_without_a_part() -> None:
    """By its place, also where names have points and brackets."""
    schema = {"properties": {"a.b[0]": {"anyOf": [{"pattern": "x", "type": "string"}]}}}
    rest = {"properties": {"a.b[0]": {"anyOf": [{"type": "string"}]}}}
    assert without(schema, ".properties.a.b[0].anyOf[0].pattern") == rest
    assert without(schema, ".properties.a.b[1].anyOf[0].pattern") is None
    assert without(schema, "") is None


def test_formats_that_are_enforced(forms: Forms) -> None:
    """None of those that are accepted is unknown to the library."""
    for one in FORMATS | MOMENTS_OF_RFC3339.keys():
        assert "grammar" in asked(forms, json.dumps({"type": "string", "format": one})), one


# -- patterns, by JavaScript itself

PIECES = [
    *("a", "b", "[", "[a", "[^", "[a-c", "&&", "[^x]]", "]", ")", "(", "(?:", "(?<n>", "|", "*", "+", "?", "??", "{2}"),
    *("{1,2}", "{1,}", "{,2}", "{", "}", "^", "$", ".", "-", r"\d", r"\w", r"\S", r"\s", r"\D", r"\-", r"\.", r"\["),
    *(r"\]", r"\u0061", r"\x62", r"\t", r"\cJ", r"\0", r"\1", r"\b", "(?=", "(?i)", r"\p{L}", r"\z", "[:alpha:]"),
    *(r"\<", r"\_", "😀", r"\u{1F600}", r"\uD83D\uDE00", "é", '"', "\\\\", "~", "--", "a-z", "/", "#", " "),
]
SAMPLES = [
    "",
    *'abx[]&-.\\^$ \u00a0\ufeff\x85\n\r\u2028é😀1_{}czA"/#~:=<!\t',
    *["a]", "l]", "aa", "ab", "bb", "a-", "aab", "b2", "ba", "{,2}"],
]
JAVASCRIPT = """
const [patterns, texts] = JSON.parse(require("fs").readFileSync(0));
console.log(JSON.stringify(patterns.map(pattern => {
  for (const flags of ["u", ""]) {
    try { const read = new RegExp(pattern, flags); return texts.map(text => read.test(text)) } catch {}
  }
  return null;
})))
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no JavaScript here")
def test_patterns_mean_what_they_mean_in_javascript(forms: Forms) -> None:
    """With flag u, and where that is an error without. What is no regular expression there is refused."""
    draw, compared = random.Random(1), 0
    patterns = sorted({"".join(draw.choices(PIECES, k=draw.randint(1, 6))) for _ in range(examples(1600))})
    questions = json.dumps([patterns, SAMPLES])
    said = subprocess.run(["node", "-e", JAVASCRIPT], input=questions, capture_output=True, text=True, check=True)
    for pattern, theirs in zip(patterns, json.loads(said.stdout), strict=True):
        schema = json.dumps({"type": "string", "pattern": pattern})
        outcome = asked(forms, schema)
        if "grammar" in outcome:
            ours = [follows(forms, schema, json.dumps(text, ensure_ascii=False)) for text in SAMPLES]
            assert ours == theirs, pattern
            compared += 1
    assert compared > len(patterns) // 8
