"""Every mutation still has its place in the code, and the test that defends its rule exists. None is run here."""

import ast
from functools import cache

import pytest
from mutations.changes import (
    Gone,
    always,
    changed,
    drop,
    gives,
    instead,
    lacks,
    never,
    parsed,
    passes,
    sets,
    swap,
    unbound,
    without,
)
from mutations.mutation import ROOT, Mutation
from mutations.table import MUTATIONS


@cache
def names_in(file: str) -> frozenset[str]:
    """The names of a file's tests."""
    module = ast.parse((ROOT / file).read_text())
    return frozenset(node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@cache
def meaning(source: str) -> str:
    return ast.dump(parsed(source))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_mutation_has_its_place(mutation: Mutation) -> None:
    before = (ROOT / mutation.file).read_text()
    after = mutation.made(before)
    if mutation.file.endswith(".py"):
        assert ast.dump(ast.parse(after)) != meaning(before)
    file, _, test = mutation.found_by.partition("::")
    assert (ROOT / file).exists()
    assert not test or test.partition("[")[0] in names_in(file)


def test_names_are_unique() -> None:
    names = [str(mutation) for mutation in MUTATIONS]
    assert sorted(names) == sorted(set(names))


SOURCE = """
LIMIT = 3
class Door:
    async def open(self, calls, now):
        # é: columns are counted in bytes
        if calls and (now < self.until or self.leaving) and len(calls) < LIMIT:
            async with asyncio.timeout(LIMIT), self.lock:
                await self.send([first, *calls], size=2, wait=None)
        self.until = max(
            now,
            self.until,
        )
        return {"a": 1, "b": calls}
"""


@pytest.mark.parametrize(
    ("where", "change", "line"),
    [
        ("open", drop("self.send"), "pass"),
        ("Door.open", always("leaving"), "if True:"),
        ("open", without("leaving"), "(now < self.until)"),
        ("open", without("LIMIT"), "if ((calls) and (now < self.until or self.leaving)):"),
        ("open", swap("<", "<=", "LIMIT"), "(len(calls)) <= (LIMIT):"),
        ("open", sets("until", "0"), "self.until = 0"),
        ("open", passes("send", "wait", "1"), "size=2, wait=1)"),
        ("open", passes("send", "size", None), "**{}, wait=None)"),
        ("open", passes("send", 0, "[]"), "self.send([], size"),
        ("open", unbound("send"), "asyncio.timeout(None), self.lock"),
        ("open", gives("{}"), "return {}"),
        ("open", lacks("b"), 'return {"a": 1}'),
        ("open", lacks("first"), "self.send([*calls], size"),
        ("open", instead("max(now, self.until)", "now"), "self.until = (now)"),
        ("", sets("LIMIT", "4"), "LIMIT = 4"),
    ],
    ids=str,
)
def test_a_change(where: str, change: object, line: str) -> None:
    after = changed(SOURCE, where, change)  # pyright: ignore[reportArgumentType]
    ast.parse(after)
    assert line in after


@pytest.mark.parametrize(
    ("where", "change", "problem"),
    [
        ("close", drop("send"), "close stands there 0 times"),
        ("open", drop("receive"), "a place with receive stands there 0 times"),
        ("open", without("now", "LIMIT"), "an operand with now, LIMIT stands there 0 times"),
        ("open", never("calls", "wait"), "a condition with calls, wait stands there 0 times"),
        ("open", instead("self.until", "now"), "the expression self.until stands there 2 times"),
    ],
)
def test_a_change_without_a_place(where: str, change: object, problem: str) -> None:
    with pytest.raises(Gone, match=problem):
        changed(SOURCE, where, change)  # pyright: ignore[reportArgumentType]
