"""Kinds of one-line changes, each found by names: a function, and the names that the changed part mentions.

A rename or a move of lines inside the function does not disturb a change. One whose function or names are gone, or that
would fit at two places, raises Gone: then the table must follow the code.

A name is dotted, `pool.number`, and stands for each name that ends so (`self.pool.number`, but not `_pool.number`). A
text or a keyword counts as a name, too.
"""

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Raise, ast.Delete, ast.Continue)
OPERATORS = {"<": ast.Lt, "<=": ast.LtE, ">": ast.Gt, ">=": ast.GtE, "==": ast.Eq, "!=": ast.NotEq}
Edit = tuple[ast.AST, str]  # a node, and the text that replaces it


class Gone(Exception):
    """The code has no place for a change any more, or several."""


@dataclass(frozen=True)
class Change:
    """A change of a part of a file; `at` gives the node that changes, and its new text."""

    kind: str
    names: tuple[str, ...]
    at: Callable[["Part"], Edit]

    def __str__(self) -> str:
        return f"{self.kind} {', '.join(self.names)}"


@dataclass(frozen=True)
class Text:
    """`old`, which stands once in a file, becomes `new`: for what is not Python, and for lines that change places."""

    old: str
    new: str

    def __str__(self) -> str:
        return f"text {self.old!r}"


def changed(source: str, where: str, change: Change | Text) -> str:
    """The source with a change in the function or class `where`; "" is the module itself. Raises Gone."""
    if isinstance(change, Text):
        if source.count(change.old) != 1:
            raise Gone(f"{change} stands there {source.count(change.old)} times")
        return source.replace(change.old, change.new)
    part = Part(source, where)
    node, new = change.at(part)
    return part.replaced(node, new)


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


class Part:
    """A function, a class or a module, and its source."""

    def __init__(self, source: str, where: str) -> None:
        """Raises Gone unless exactly one function or class has this name: `f`, `Class` or `Class.f`."""
        self._raw, module = source.encode(), parsed(source)
        self._starts = [0]  # of each line, in bytes, as ast counts columns
        for line in self._raw.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        found = [node for name, node in _named(module) if _ends(name, where)] if where else [module]
        self.node: ast.AST = _one(found, where)

    def text(self, node: ast.AST) -> str:
        begin, end = self._span(node)
        return self._raw[begin:end].decode()

    def replaced(self, node: ast.AST, new: str) -> str:
        begin, end = self._span(node)
        return (self._raw[:begin] + new.encode() + self._raw[end:]).decode()

    def one(self, names: tuple[str, ...], fits: Callable[[ast.AST], bool], sought: str = "") -> ast.AST:
        """The node that mentions all names and fits; of two that contain each other the inner one. Raises Gone.

        sought: what it is, in words, where the names do not say it.
        """
        found = [node for node in ast.walk(self.node) if fits(node) and _mentions(node, names)]
        inner = [node for node in found if not any(other in found for other in _below(node))]
        return _one(inner, sought or f"a place with {', '.join(names)}")

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.stmt | ast.expr | ast.keyword)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset


# -- the kinds of changes
def drop(*names: str) -> Change:
    """The statement that mentions the names is left out."""
    return Change("drop", names, lambda part: (part.one(names, lambda node: isinstance(node, SIMPLE)), "pass"))


def never(*names: str) -> Change:
    """The condition that mentions the names is false."""
    return Change("never", names, lambda part: (_condition(part, names), "False"))


def always(*names: str) -> Change:
    """The condition that mentions the names is true."""
    return Change("always", names, lambda part: (_condition(part, names), "True"))


def negate(*names: str) -> Change:
    """The condition that mentions the names is turned round."""

    def at(part: Part) -> Edit:
        node = _condition(part, names)
        return node, f"not ({part.text(node)})"

    return Change("negate", names, at)


def without(*names: str) -> Change:
    """The operand of an `and`, an `or` or a sum that mentions the names is left out."""

    def at(part: Part) -> Edit:
        def has(node: ast.AST) -> bool:
            return any(_mentions(one, names) for one in _operands(node))

        sought = f"an operand with {', '.join(names)}"
        node = part.one((), lambda node: has(node) and not any(has(other) for other in _below(node)), sought)
        rest = [part.text(one) for one in _operands(node) if not _mentions(one, names)]
        if not rest:
            raise Gone(f"all operands mention {', '.join(names)}")
        word = " or " if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or) else " and "
        return node, f"({word.join(f'({one})' for one in rest)})"

    return Change("without", names, at)


def swap(old: str, new: str, *names: str) -> Change:
    """The comparison `old` that mentions the names becomes `new`."""

    def at(part: Part) -> Edit:
        def fits(node: ast.AST) -> bool:
            return isinstance(node, ast.Compare) and any(isinstance(op, OPERATORS[old]) for op in node.ops)

        node = part.one(names, fits)
        assert isinstance(node, ast.Compare)
        words = {kind: word for word, kind in OPERATORS.items()}
        ops = [new if isinstance(op, OPERATORS[old]) else words.get(type(op)) for op in node.ops]
        if None in ops:
            raise Gone(f"{part.text(node)}: only < <= > >= == != can stand beside {old}")
        sides = [f"({part.text(side)})" for side in (node.left, *node.comparators)]
        return node, " ".join([sides[0], *(f"{op} {side}" for op, side in zip(ops, sides[1:], strict=True))])

    return Change(f"swap {old} {new}", names, at)


def sets(target: str, value: str, *names: str) -> Change:
    """Sets `target` to `value`. names: that the old value mentions, where it is set several times."""

    def at(part: Part) -> Edit:
        def fits(node: ast.AST) -> bool:
            if isinstance(node, ast.Assign):
                targets, old = node.targets, node.value
            elif isinstance(node, ast.AnnAssign | ast.AugAssign):
                targets, old = [node.target], node.value
            else:
                return False
            return old is not None and any(_mentions(one, (target,)) for one in targets) and _mentions(old, names)

        node = part.one((), fits, f"a value of {target}")
        assert isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
        assert node.value is not None
        return node.value, value

    return Change("sets", (target, *names), at)


def gives(value: str, *names: str) -> Change:
    """The value of the `return` that mentions the names becomes `value`."""

    def at(part: Part) -> Edit:
        node = part.one(names, lambda node: isinstance(node, ast.Return) and node.value is not None)
        assert isinstance(node, ast.Return)
        assert node.value is not None
        return node.value, value

    return Change("gives", names, at)


def passes(call: str, argument: str | int, value: str | None, *names: str) -> Change:
    """An argument of the call, by its keyword or its place, becomes `value`; None: a keyword is left out.

    names: that the call mentions, where it is made several times.
    """

    def at(part: Part) -> Edit:
        def given(node: ast.AST) -> ast.AST | None:
            if not isinstance(node, ast.Call) or not _is(node.func, call) or not _mentions(node, names):
                return None
            if isinstance(argument, int):
                return node.args[argument] if argument < len(node.args) else None
            return next((one for one in node.keywords if one.arg == argument), None)

        node = given(part.one((), lambda node: given(node) is not None, f"a call of {call} with {argument}"))
        assert node is not None
        if isinstance(node, ast.keyword):
            return node, f"{argument}={value}" if value is not None else "**{}"
        assert value is not None, "only a keyword can be left out"
        return node, value

    return Change("passes", (call, str(argument), *names), at)


def unbound(*names: str) -> Change:
    """The `asyncio.timeout` around a body that mentions the names has no bound."""

    def at(part: Part) -> Edit:
        def timeouts(node: ast.AST) -> list[ast.Call]:
            if not isinstance(node, ast.AsyncWith) or not any(_mentions(line, names) for line in node.body):
                return []
            calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
            return [call for call in calls if _is(call.func, "asyncio.timeout") and call.args]

        node = part.one((), lambda node: bool(timeouts(node)), f"a timeout around {', '.join(names)}")
        return timeouts(node)[0].args[0], "None"

    return Change("unbound", names, at)


def lacks(*names: str) -> Change:
    """The element of a list, a tuple, a set or a dict in braces that mentions the names is left out."""

    def at(part: Part) -> Edit:
        def elements(node: ast.AST) -> list[tuple[ast.AST, str]]:
            if isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
                return [(ast.List([key or value, value]), _pair(part, key, value)) for key, value in pairs]
            if isinstance(node, ast.List | ast.Tuple | ast.Set):
                return [(one, part.text(one)) for one in node.elts]
            return []

        def has(node: ast.AST) -> bool:
            return any(_mentions(one, names) for one, _ in elements(node))

        sought = f"an element with {', '.join(names)}"
        node = part.one((), lambda node: has(node) and not any(has(other) for other in _below(node)), sought)
        rest = [text for one, text in elements(node) if not _mentions(one, names)]
        if len(rest) != len(elements(node)) - 1:
            raise Gone(f"several elements mention {', '.join(names)}")
        if isinstance(node, ast.Set) and not rest:
            return node, "set()"
        begin, end = {ast.Tuple: "()", ast.List: "[]"}.get(type(node), "{}")
        comma = "," if isinstance(node, ast.Tuple) and rest else ""
        return node, f"{begin}{', '.join(rest)}{comma}{end}"

    return Change("lacks", names, at)


def instead(old: str, new: str) -> Change:
    """The expression `old`, however it is laid out, becomes `new`."""
    wanted = ast.dump(ast.parse(old, mode="eval").body)

    def at(part: Part) -> Edit:
        found = [node for node in ast.walk(part.node) if isinstance(node, ast.expr) and ast.dump(node) == wanted]
        return _one(found, f"the expression {old}"), f"({new})"

    return Change("instead", (old,), at)


# -- the parts
def _condition(part: Part, names: tuple[str, ...]) -> ast.AST:
    conditions: list[ast.AST] = []
    for node in ast.walk(part.node):
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            conditions.append(node.test)
        elif isinstance(node, ast.comprehension):
            conditions += node.ifs
        elif isinstance(node, ast.match_case) and node.guard is not None:
            conditions.append(node.guard)
    return _one([node for node in conditions if _mentions(node, names)], f"a condition with {', '.join(names)}")


def _operands(node: ast.AST) -> list[ast.expr]:
    return node.values if isinstance(node, ast.BoolOp) else []


def _pair(part: Part, key: ast.expr | None, value: ast.expr) -> str:
    return f"**{part.text(value)}" if key is None else f"{part.text(key)}: {part.text(value)}"


def _one(found: Sequence[ast.AST], sought: str) -> ast.AST:
    if len(found) != 1:
        raise Gone(f"{sought} stands there {len(found)} times")
    return found[0]


def _below(node: ast.AST) -> Iterator[ast.AST]:
    below = ast.walk(node)
    next(below)
    return below


def _named(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """The functions and classes below a node by their dotted names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + child.name, child
            yield from _named(child, f"{prefix}{child.name}.")
        else:
            yield from _named(child, prefix)


def _mentions(node: ast.AST, names: tuple[str, ...]) -> bool:
    parts = list(ast.walk(node))
    return all(any(_is(part, name) for part in parts) for name in names)


def _is(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Attribute() | ast.Name():
            return _ends(_dotted(node), name)
        case ast.Constant(value=str(text)):
            return text == name
        case ast.keyword(arg=str(word)):
            return word == name
    return False


def _dotted(node: ast.AST) -> str:
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return f"{_dotted(node.value)}.{node.attr}"
    return ""


def _ends(dotted: str, name: str) -> bool:
    return dotted == name or dotted.endswith(f".{name}")
