"""How calls of tools are read from answers: four syntaxes, in pieces, and held to the schemas by a grammar."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from checkpoints import make_gpt2
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from tool_templates import TEMPLATES, XML, some_tools

from orca.v1.orca_pb2 import TOOL_CHOICE_REQUIRED, Chat
from orca_common.checkpoint import read_checkpoint
from orca_common.errors import InvalidArgument
from orca_common.forms import Forms
from orca_endpoint.requests.form_compiler import Question, compiled_form, compiled_tools
from orca_endpoint.requests.tools import Tools, tools_of
from orca_endpoint.requests.validation import Fields
from orca_endpoint.text.tool_calls import SYNTAXES, CallReader, Said, Syntax, call_id, merged, syntax_in
from orca_endpoint.text.vocabulary import TextStream, Vocabulary

ARGUMENTS: tuple[str, ...] = ('{"a": "}{\\"]["}', "{}", '{ "b":[{"c": {}}, "\\\\"],\n "d": "東京"}')
END = 256  # the end-of-sequence token
ERROR = Fields({"chat.tools": "tools"}).error


def spelled(syntax: Syntax, text: str, calls: list[tuple[str, str]]) -> str:
    if not calls:
        return text
    parts = [name + syntax.middle + arguments for name, arguments in calls]
    return text + syntax.first + (syntax.next or "").join(parts) + syntax.last


def read(reader: CallReader, pieces: list[str]) -> Said:
    """Reads all pieces, and joins them."""
    said = [*(reader.push(piece) for piece in pieces), reader.flush()]
    return Said("".join(one.content for one in said), tuple(merged([part for one in said for part in one.calls])))


@st.composite
def answers(draw: st.DrawFn) -> tuple[Syntax, str, list[tuple[str, str]]]:
    """A syntax, a text that may look like the beginning of a call, and calls."""
    syntax = draw(st.sampled_from([*SYNTAXES.values()]))
    names: list[str] = ["f", "get_weather-2"]
    call = st.tuples(st.sampled_from(names), st.sampled_from(ARGUMENTS))
    calls = draw(st.lists(call, max_size=1 if syntax.next is None else 3))
    if syntax.leads and calls:
        return syntax, "", calls
    beginnings = [syntax.trigger[:n] for n in range(1, len(syntax.trigger))]
    return syntax, "".join(draw(st.lists(st.sampled_from(["", "a", "東京\n", *beginnings]), max_size=4))), calls


@given(answers(), st.data())
def test_an_answer_says_the_same_wherever_its_pieces_end(
    answer: tuple[Syntax, str, list[tuple[str, str]]], data: st.DataObject
) -> None:
    syntax, text, calls = answer
    if syntax.trigger in text + syntax.first[: len(syntax.trigger) - 1]:
        return  # the beginnings made a whole one
    whole = spelled(syntax, text, calls)
    borders = sorted(data.draw(st.sets(st.integers(0, len(whole)))))
    pieces = [whole[a:b] for a, b in zip([0, *borders], [*borders, len(whole)], strict=True)]
    reader = CallReader(syntax, "r")
    said = read(reader, pieces)
    assert said.content == text
    assert [(part.name, part.arguments) for part in said.calls] == calls
    assert [part.id for part in said.calls] == [call_id("r", n) for n in range(len(calls))]
    assert reader.called == bool(calls)


@pytest.mark.parametrize("name", SYNTAXES)
def test_an_answer_that_is_cut(name: str) -> None:
    """At every place: text and arguments come as far as they are there, and nothing comes twice."""
    syntax = SYNTAXES[name]
    whole = spelled(
        syntax, "" if syntax.leads else "hm", [("f", ARGUMENTS[0]), ("g", "{}")][: 1 if syntax.leads else 2]
    )
    seen: list[Said] = []
    for end in range(len(whole)):
        reader = CallReader(syntax, "r")
        seen.append(said := read(reader, [*whole[:end]]))
        assert whole.startswith(said.content)
        assert [part.at for part in said.calls] == [*range(len(said.calls))]
    assert len({json.dumps(said) for said in seen}) > len(ARGUMENTS[0])


def test_a_name_that_comes_twice_in_a_call_is_found() -> None:
    """At any depth, in any of the calls, whole or cut; the same name in two objects is no fault."""
    syntax = SYNTAXES["hermes"]
    for arguments, name in (
        ('{"a": {"b": 1}, "b": {"a": 2}}', None),
        ('{"a": "\\"a\\": 1", "\\u0062": 1}', None),
        ('{"a": ' * 5000 + "{}" + "}" * 5000, None),
        ('{"x": 1, "y": [{"x": 1, "z": 2, "x": 3}]}', "x"),
        ('{"": 1, "": 1}', ""),
    ):
        for calls in ([("f", arguments), ("g", "{}")], [("f", "{}"), ("g", arguments)]):
            whole, reader = spelled(syntax, "", calls), CallReader(syntax, "r")
            read(reader, [*whole])
            assert reader.doubled == name, arguments
    for arguments, name in (("", None), ('{"x": 1, "', None), ('{"x": 1, "x', None), ('{"y": [{"x": 1, "x": "B', "x")):
        cut = CallReader(syntax, "r")
        read(cut, [*(syntax.first + "f" + syntax.middle + arguments)])
        assert cut.doubled == name, arguments


@given(st.sampled_from([*SYNTAXES.values()]), st.text('{}[]",:a\\\n'), st.text('{}[]",:a\\'))
def test_any_text_is_read(syntax: Syntax, first: str, second: str) -> None:
    """Where no grammar held the answer to JSON, as in an answer of a release before."""
    text = spelled(syntax, "", [("f", "{}" + first), ("f", second)] if syntax.next is not None else [("f", first)])
    reader = CallReader(syntax, "request")
    said = read(reader, [*text])
    assert sum(len(part.arguments) for part in said.calls) <= len(text)


def test_the_ids_of_calls() -> None:
    """Nine letters and digits, as the strictest templates want them; others for each call and each request."""
    ids = {call_id(request, n) for request in ("a", "b") for n in range(50)}
    assert len(ids) == 100
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    assert call_id("a", 0) == call_id("a", 0)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_says_its_syntax(name: str) -> None:
    assert syntax_in(TEMPLATES[name]) is SYNTAXES[name]


def test_other_templates_say_none() -> None:
    for template in (XML, XML.replace("<function=", "<arg_key>"), TEMPLATES["hermes"] + TEMPLATES["mistral"]):
        assert syntax_in(template) is None


# -- the grammar


@pytest.fixture(scope="module", params=["marks", "plain"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes, where the marks of all syntaxes are special tokens, or texts as any other."""
    marks = sorted({mark for syntax in SYNTAXES.values() for mark in syntax.marks})
    special = ["</s>", *(marks if request.param == "marks" else [])]
    shape = {"heads": 1, "layers": 1, "hidden": 4, "vocab": 256 + len(special), "positions": 16, "seed": 1}
    return make_gpt2(tmp_path_factory.mktemp("model"), **shape, tokenizer=True, special=special, eos_token_id=END)


def an_answer(draw: random.Random, matcher: LLMatcher, vocab: int) -> list[int]:
    """Random tokens that the grammar allows, until it ends."""
    ids = list[int]()
    while not matcher.is_stopped():
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), count=vocab, bitorder="little")
        token = int(draw.choice(mask.nonzero()[0]))
        if token == END:
            break
        assert matcher.consume_tokens([token])
        ids.append(token)
    return ids


def tools_from(given: list[dict[str, Any]], syntax: Syntax, **fields: Any) -> Tools:
    return tools_of(Chat(tools=json.dumps(given), **fields), syntax, ERROR)


@pytest.mark.parametrize("name", SYNTAXES)
def test_random_answers_are_read_as_calls_of_the_tools(model: Path, name: str) -> None:
    """Whatever tokens come: forced calls name a tool, and their arguments follow its schema."""
    draw, syntax = random.Random(name), SYNTAXES[name]
    checkpoint, vocabulary = read_checkpoint(model), Vocabulary(model / "tokenizer.json")
    forms = Forms(checkpoint)
    forms.open()
    counts = set[int]()
    for n in range(12):
        given = some_tools(draw)
        tools = tools_from(given, syntax, tool_choice=TOOL_CHOICE_REQUIRED, one_tool_call=n % 3 == 0)
        answer = compiled_form(forms, tools.form(None))
        ids = an_answer(draw, forms.matcher(answer["grammar"]), checkpoint.vocab_size)
        stream, reader = TextStream(vocabulary, (), syntax.marks), CallReader(syntax, "r")
        said = read(reader, [*(stream.push(i)[0] for i in ids), stream.flush()])
        assert said.content == ""
        assert reader.called
        assert len(said.calls) == 1 or n % 3
        counts.add(len(said.calls))
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in given}
        for call in said.calls:
            arguments = json.loads(call.arguments)
            schema = schemas[call.name] or {"type": "object", "maxProperties": 0}
            jsonschema.Draft202012Validator(schema).validate(arguments)
    assert syntax.next is None or len(counts) > 1, "several calls come, too"


@pytest.mark.parametrize("name", SYNTAXES)
def test_a_free_answer_is_bound_from_the_trigger_on(model: Path, name: str) -> None:
    syntax = SYNTAXES[name]
    checkpoint, vocabulary = read_checkpoint(model), Vocabulary(model / "tokenizer.json")
    forms = Forms(checkpoint)
    forms.open()
    function = {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    }
    tools = tools_from([{"type": "function", "function": function}], syntax)
    free = compiled_form(forms, tools.form(None))["grammar"]
    formed = compiled_form(forms, tools.form({"type": "object", "properties": {"q": {"type": "boolean"}}}))["grammar"]
    silent = compiled_form(forms, Tools(syntax, [], False, False).form(None))["grammar"]
    call, text = spelled(syntax, "", [("f", '{"a": 12}')]), "" if syntax.leads else "hm 東京 "

    def follows(grammar: str, answer: str) -> bool:
        matcher: LLMatcher = forms.matcher(grammar)
        ids = vocabulary.encode(answer, special=False)
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    for fine in ("", "hm", "hm 東京 {}", syntax.trigger[:-1], text + call):
        assert follows(free, fine), fine
    for wrong in (
        text + call.replace("12", '"b"'),
        text + call.replace("f", "g", 1),
        text + syntax.trigger,
        call + "x",
    ):
        assert not follows(free, wrong), wrong
    assert follows(formed, '{"q": true}')
    assert follows(formed, call)
    assert not follows(formed, "hm")
    assert follows(silent, "hm")
    assert not follows(silent, text + call)


@pytest.mark.parametrize("name", SYNTAXES)
def test_a_member_of_arguments_has_one_spelling(model: Path, name: str) -> None:
    """Also where a function takes others than those that it lists."""
    syntax, forms, vocabulary = SYNTAXES[name], Forms(read_checkpoint(model)), Vocabulary(model / "tokenizer.json")
    forms.open()
    listed = {"properties": {"a": {"type": "string"}, "ö": {"type": "string"}}}
    for more in ({"additionalProperties": True}, {"additionalProperties": {"type": "integer"}}, {"allOf": [{}]}):
        tools = tools_from([function(parameters={**listed, **more})], syntax, tool_choice=TOOL_CHOICE_REQUIRED)
        matcher = forms.matcher(compiled_form(forms, tools.form(None))["grammar"])
        for arguments, fits in (
            ('{"a": "x", "ö": "x", "other": 5}', True),
            ('{"other": 5}', True),
            ('{"a": "x", "a": 5}', False),
            ('{"\\u0061": 5}', False),
            ('{"a": "x", "\\u0061": 5}', False),
            ('{"\\u00f6": 5}', False),
            ('{"other": 5, "\\u00F6": 5}', False),
        ):
            ids = vocabulary.encode(spelled(syntax, "", [("f", arguments)]), special=False)
            answer = matcher.deep_copy()
            assert (answer.try_consume_tokens(ids) == len(ids) and answer.is_accepting()) == fits, arguments


def test_an_answer_of_json_beside_calls_that_look_like_it(model: Path) -> None:
    """Llama's calls are JSON. An answer that may begin as they do could be read as one, and is refused."""
    forms = Forms(read_checkpoint(model))
    forms.open()
    chat = Chat(tools=json.dumps([function()]))

    def answer(schema: dict[str, Any], syntax: str = "llama", **choice: Any) -> dict[str, Any]:
        text = json.dumps(schema)
        asked: Question = {"kind": "chat.tools", "loose": True, "bare": False, "syntax": syntax, "schema": text}
        return compiled_tools(forms, asked, Chat(tools=chat.tools, **choice))

    person = {"properties": {"name": {"type": "string"}}, "required": ["name"]}
    city = {"properties": {"city": {"type": "string"}, **person["properties"]}, "required": ["city"]}
    for schema in (person, {"type": "object"}):
        refused = answer(schema)
        assert refused["field"] == "json_schema"
        assert 'may begin with {"name": "' in refused["problem"]
    for fine in (answer(city), answer(person, "hermes"), answer({"type": "array"}), answer(person, tool_choice=1)):
        assert "grammar" in fine, fine
    near = {name: {"type": ["integer", "object"]} for name in ("na", "names", "n", "na\\u006dx")}
    grammar = answer({"type": "object", "properties": near, "additionalProperties": False})["grammar"]
    assert forms._tokenizer is not None
    for said in ('{"na": 1}', '{"names":1,"n": {"name": "y"}}', "{}", '{ "n": 1}', '{"name": "f", "parameters": {}}'):
        matcher, ids = forms.matcher(grammar), forms._tokenizer.tokenize_str(said)
        assert matcher.try_consume_tokens(ids) == len(ids), said
        assert matcher.is_accepting(), said


@pytest.mark.parametrize(
    ("parameters", "closed"),
    [
        ({"properties": {}}, True),
        ({"properties": {"a": {}}, "minProperties": 0}, True),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "null"}}, False),
        ({"properties": {"a": {}}, "required": ["a", "b"]}, False),
        ({"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}]}, False),
        ({}, False),
    ],
)
def test_arguments_that_a_function_lists_are_all(parameters: dict[str, Any], closed: bool) -> None:
    """A model that may add members does: `properties: {}` is no less closed than no parameters."""
    (found,) = tools_from([function(parameters=parameters)], SYNTAXES["hermes"]).functions
    assert (found["parameters"].get("additionalProperties") is False) == closed


# -- what is refused


def function(**members: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **members}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


BAD: dict[str, tuple[Any, str]] = {
    "no list": ({}, "tools: must be a list of at least one tool"),
    "many": ([function()] * 129, "tools: has 129 tools; at most 128 are allowed"),
    "large": (
        [function(parameters={"description": "x" * 65536})],
        r"tools\[0\]\.function\.parameters: has 65555 bytes; at most 65536 are allowed",
    ),
    "deep": ([function(parameters=nested(40))], "tools: is too deep: at most 64"),
    "no object": ([[]], r"tools\[0\]: must be an object"),
    "no type": ([{"function": {"name": "f"}}], r"tools\[0\]\.type: is missing; only 'function' is supported"),
    "custom": ([{"type": "custom", "custom": {}}], r"tools\[0\]\.custom: is not known"),
    "no function": ([{"type": "function"}], r"tools\[0\]\.function: is missing"),
    "member": ([function(returns=1)], r"tools\[0\]\.function\.returns: is not known"),
    "no name": ([function(name=None)], r"tools\[0\]\.function\.name: is missing"),
    "name": ([function(name="a b")], r"tools\[0\]\.function\.name: may hold only letters"),
    "long name": ([function(name="a" * 65)], r"tools\[0\]\.function\.name: .*at most 64"),
    "twice": ([function(), function()], r"tools\[1\]\.function\.name: is 'f', as that of another"),
    "description": ([function(description=1)], r"tools\[0\]\.function\.description: must be a string"),
    "strict": ([function(strict="yes")], r"tools\[0\]\.function\.strict: must be true or false"),
    "no schema": ([function(parameters=[])], r"tools\[0\]\.function\.parameters: must be a JSON schema"),
    "a string": ([function(parameters={"type": "string"})], r"tools\[0\]\.function\.parameters\.type: must be .object"),
    "white space": ([function(parameters={"x-guidance": {}})], r"tools\[0\]\.function\.parameters\.x-guidance: is not"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_tools(name: str) -> None:
    given, problem = BAD[name]
    with pytest.raises(InvalidArgument, match=f"^{problem}"):
        tools_from(given, SYNTAXES["hermes"])


def test_the_bound_of_bytes_is_for_each_tool() -> None:
    long = {"description": "x" * 65000}
    given = [function(name=f"f{n}", description="y" * 70000, parameters=long) for n in range(3)]
    assert len(tools_from(given, SYNTAXES["hermes"]).functions) == 3


def test_a_choice_of_a_newer_client() -> None:
    with pytest.raises(InvalidArgument, match=r"^chat\.tool_choice: is 9, which this release does not know"):
        tools_from([function()], SYNTAXES["hermes"], tool_choice=9)


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ("[", "is not JSON"),
        ('["\\ud800"]', "lone surrogate"),
        ("[" * 10000, "is not JSON"),
        ("[NaN]", "NaN is not JSON"),
        ("[-Infinity]", "-Infinity is not JSON"),
        ('[{"a": 1, "b": {"c": 1, "c": 2}}]', "the name 'c' comes twice in one object"),
        ("[" * 65 + "]" * 65, "at most 64 objects and lists"),
        ("[" * 65 + "1" + "]" * 65, "at most 64 objects and lists"),
        ("[" * 64 + "1" + "]" * 64, "must be an object"),
    ],
)
def test_no_json(raw: str, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"^tools(\[0\])?: .*{problem}"):
        tools_of(Chat(tools=raw), SYNTAXES["hermes"], ERROR)


def test_a_schema_that_cannot_be_enforced_is_refused_with_its_place(model: Path) -> None:
    forms = Forms(read_checkpoint(model))
    forms.open()
    schema = {"properties": {"a": {"items": {"uniqueItems": True}}}}
    tools = tools_from([function(), function(name="g", parameters=schema)], SYNTAXES["hermes"])
    answer = compiled_form(forms, tools.form(None))
    assert answer["place"] == "[1].function.parameters.properties.a.items.uniqueItems"
    assert answer["problem"] == "cannot be enforced"


def test_what_is_left_out_for_a_function_that_is_not_strict(model: Path) -> None:
    """Others are held to their schemas, whether all compile together, each alone, or not at all."""
    forms = Forms(read_checkpoint(model))
    forms.open()
    odd: dict[str, Any] = {"properties": {"q": {"propertyNames": {"maxLength": 1}}, "r": {"type": "null", "enum": [1]}}}
    odd["required"] = ["r"]
    held: dict[str, Any] = {"properties": {"city": {"type": "string"}}}
    given = [function(name="f", parameters=held, strict=True), function(name="g", parameters=odd)]
    form = tools_from(given, SYNTAXES["hermes"]).form(None)
    answer = compiled_form(forms, form, loose=True)
    assert answer["left_out"] == [("g", ".required"), ("g", ".properties.q.propertyNames")]
    assert "city" in answer["grammar"]
    answer = compiled_form(forms, form, loose=True, bare=True)
    assert answer["left_out"] == [("g", "")]
    assert ("city" in answer["grammar"], '"q"' in answer["grammar"]) == (True, False)
    assert "q.propertyNames" in compiled_form(forms, form)["place"]
