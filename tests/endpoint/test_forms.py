"""Forms of answers at the endpoint: refused with their place, in bounded time and memory, off the event loop."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from checkpoints import make_gpt2
from endpoint.harness import until

from orca_common.checkpoint import read_checkpoint
from orca_common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from orca_common.statuses import details_of
from orca_endpoint.openai.response_format import format_in
from orca_endpoint.requests import helpers
from orca_endpoint.requests.forms import FormCompiler
from orca_endpoint.requests.turns import Turns
from orca_endpoint.requests.validation import Fields

FIELDS = Fields({})
SMALL = {"heads": 1, "layers": 1, "hidden": 4, "vocab": 258, "positions": 16, "seed": 1}


@pytest.fixture
async def compiler(tmp_path: Path) -> AsyncIterator[FormCompiler]:
    folder = make_gpt2(tmp_path, **SMALL, tokenizer=True, special=["</s>"], eos_token_id=256)
    compiler = FormCompiler(read_checkpoint(folder))
    yield compiler
    await compiler.close()


# An object of thousands of optional members: seconds of CPU, which the process may not have for one form.
HARD = json.dumps({"type": "object", "properties": {f"p{n}": {} for n in range(5000)}}, separators=(",", ":"))
# A rule that may be read in many ways. Its first mask is cheap; those behind the x take seconds.
AMBIGUOUS = "\n".join(
    ['start: "x" s', "s: " + " | ".join(f"n{n}" for n in range(150))]
    + [f"n{n}: s s | s n{(n + 1) % 150} | n{n} s | /[a-z]/" for n in range(150)]
)
BAD = {
    "type": ("json_schema", '{"type": "nonsense"}', r"^json_schema\.type: is 'nonsense'; the types of JSON are"),
    "place": (
        "json_schema",
        '{"properties": {"a": {"items": {"anyOf": [true, {"uniqueItems": true}]}}}}',
        r"^json_schema\.properties\.a\.items\.anyOf\[1\]\.uniqueItems: cannot be enforced$",
    ),
    "not json": ("json_schema", "{", "^json_schema: not valid JSON"),
    "no schema": ("json_schema", "[]", "^json_schema: must be a JSON schema, which is an object$"),
    "deep": ("json_schema", '{"items":' * 6000 + "{}" + "}" * 6000, "^json_schema: "),
    "regex": ("regex", "(a", "^regex: .*unclosed group$"),
    "grammar": ("grammar", "start: x", '^grammar: .*unknown name: "x"$'),
    "hard": ("json_schema", HARD, "^json_schema: is too large or too complex to be followed$"),
    "ambiguous": ("grammar", AMBIGUOUS, "^grammar: is too large or too complex to be followed$"),
    "nested": ("regex", "(" * 20000 + "a" + ")" * 20000, "^regex: "),
    "empty": ("regex", "", "^regex: is empty$"),
    "long": ("regex", "a" * 65537, "^regex: has 65537 bytes; at most 65536 are allowed$"),
}


async def test_bad_forms_are_refused_with_their_place(compiler: FormCompiler) -> None:
    for n, (kind, text, problem) in enumerate(BAD.values()):
        with pytest.raises(InvalidArgument, match=problem):
            await compiler.grammar(kind, text, FIELDS)
        assert await compiler.grammar("regex", f"a|b{n}", FIELDS), "the next one is compiled"


async def test_a_refusal_can_be_sent_whatever_the_schema_holds(compiler: FormCompiler) -> None:
    """JSON can spell half of a surrogate pair, which no message and no header can hold."""
    for schema in (
        r'{"properties": {"a\ud800": {"uniqueItems": true}}}',
        r'{"properties": {"a\ud800": {"type": "string", "pattern": "(?\udc00a)"}}}',
        r'{"$ref": "#/$defs/\ud800"}',
        r'{"\ud800": 1, "type": "\ud800"}',
        r'{"enum": ["\ud800"]}',
        r'{"x-guidance": {"\ud800": 1}}',
    ):
        with pytest.raises(InvalidArgument) as refused:
            await compiler.grammar("json_schema", schema, FIELDS)
        assert str(refused.value).encode()
        assert [one.SerializeToString() for one in details_of(refused.value)]


async def test_the_callers_name_of_the_field(compiler: FormCompiler) -> None:
    names = Fields({"json_schema": "response_format.json_schema.schema"})
    with pytest.raises(InvalidArgument, match=r"^response_format\.json_schema\.schema\.properties\.a\.type: "):
        await compiler.grammar("json_schema", '{"properties": {"a": {"type": "b"}}}', names)


async def test_a_bounded_number_of_each_caller_waits(compiler: FormCompiler) -> None:
    turns = compiler.helpers.turns
    turns.waiting = 3
    asked = [asyncio.create_task(compiler.grammar("regex", f"a{{{n}}}", FIELDS, "x")) for n in range(1, 5)]
    await until(lambda: compiler.helpers.turns.count == 3)
    with pytest.raises(ResourceExhausted, match="3 forms of this caller"):
        await compiler.grammar("regex", "b", FIELDS, "x")
    turns.all_waiting = 3
    other = asyncio.create_task(compiler.grammar("regex", "b", FIELDS, "y"))
    await until(lambda: not compiler.helpers._free)
    with pytest.raises(ResourceExhausted, match="3 forms wait"):
        await compiler.grammar("regex", "c", FIELDS, "y")
    same = await compiler.grammar("regex", "a{1}", FIELDS, "x")
    assert same in await asyncio.gather(*asked)
    assert await other


async def test_callers_have_turns_in_rotation() -> None:
    """One of each caller at a time, however many others it waits for."""
    turns, order, end = Turns("works", 2, 1, 8, 8), list[str](), asyncio.Event()

    async def ask(name: str) -> None:
        async with turns.turn(name[0]):
            order.append(name)
            await end.wait()

    asked = [asyncio.create_task(ask(f"x{n}")) for n in range(3)]
    await until(lambda: turns.count == 2)
    asked += [asyncio.create_task(ask(name)) for name in ("y0", "z0", "z1", "y1")]
    await until(lambda: turns.count == 5)
    assert order == ["x0", "y0"]
    asked[4].cancel()  # z0
    end.set()
    await asyncio.gather(*asked, return_exceptions=True)
    assert order == ["x0", "y0", "x1", "z1", "y1", "x2"]
    assert not turns.count


async def test_a_form_that_is_too_hard_keeps_no_other_caller_waiting(compiler: FormCompiler) -> None:
    """Nor does the start of another process after it."""
    await compiler.grammar("regex", "a", FIELDS, "y")
    hard = [asyncio.create_task(compiler.grammar("json_schema", HARD + " " * n, FIELDS, "x")) for n in range(4)]
    await until(lambda: compiler.helpers.turns.count == 3)
    for n in range(20):
        assert await compiler.grammar("regex", f"a{{{n}}}", FIELDS, "y")
    assert compiler.helpers.turns.count, "and some of the hard ones wait still"
    assert all(isinstance(one, InvalidArgument) for one in await asyncio.gather(*hard, return_exceptions=True))


async def test_a_killed_compiler_is_no_fault_of_the_next_form(compiler: FormCompiler) -> None:
    await compiler.grammar("regex", "a", FIELDS)
    killed = [await one.start() for one in compiler.helpers.all]
    for process in killed:
        process.kill()
    assert await compiler.grammar("regex", "b", FIELDS, "x")
    assert await compiler.grammar("regex", "c", FIELDS, "y")
    assert [await process.wait() for process in killed] == [-signal.SIGKILL] * 2


async def test_an_end_that_is_under_way_is_waited_for(compiler: FormCompiler) -> None:
    """An endpoint that leaves leaves no process behind."""
    helper = compiler.helpers.all[0]
    process = await helper.start()
    ending = asyncio.create_task(helper.end())
    await asyncio.sleep(0)
    assert not ending.done()
    await helper.close()
    assert process.returncode is not None
    await ending


async def test_compilers_that_are_ended_are_unavailable_and_not_remembered(
    compiler: FormCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helpers, "PATIENCE", 0.0)  # no compiler answers in time
    with pytest.raises(Unavailable, match="the compiler of forms was ended, or did not answer"):
        await compiler.grammar("regex", "a", FIELDS)
    monkeypatch.undo()
    assert await compiler.grammar("regex", "a", FIELDS)


async def test_a_form_that_ends_compilers_is_not_remembered(compiler: FormCompiler) -> None:
    """The same form is tried again."""
    kind, text, problem = BAD["hard"]
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=problem):
            await compiler.grammar(kind, text, FIELDS)
        assert not compiler._kept


async def test_a_caller_that_leaves(compiler: FormCompiler) -> None:
    """Its form is compiled all the same, and the compiler goes on."""
    leaving = asyncio.create_task(compiler.grammar("regex", "c", FIELDS))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert await compiler.grammar("regex", "d", FIELDS)


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        ({"tokenizer": False}, "has no tokenizer.json"),
        ({"tokenizer": True}, "has no end-of-sequence token"),
        ({"tokenizer": True, "eos_token_id": 257}, "has no end-of-sequence token"),  # which has no text
    ],
)
async def test_models_that_cannot(tmp_path: Path, made: dict, problem: str) -> None:
    compiler = FormCompiler(read_checkpoint(make_gpt2(tmp_path, **SMALL, **made)))
    with pytest.raises(FailedPrecondition, match=f"^regex: this model.*{problem}"):
        await compiler.grammar("regex", "a", FIELDS)
    await compiler.close()


def test_all_members_of_a_json_schema() -> None:
    """OpenAI's clients send each of them."""
    schema = {"type": "object", "description": "b"}
    given = {"name": "a", "description": "of the answer", "strict": True, "schema": schema}
    found = format_in({"response_format": {"type": "json_schema", "json_schema": given}}, "response_format")
    assert found is not None
    assert (json.loads(found.schema), found.strict) == (schema, True)
    flat = format_in({"format": {"type": "json_schema", **given}}, "text.format", flat=True)
    assert flat == found._replace(field="text.format.schema")
