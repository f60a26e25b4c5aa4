"""The chat template of a checkpoint: makes the text of a prompt from messages, exactly as `transformers` does.

A template is a program by the author of the checkpoint. It runs in jinja2's sandbox, with a bound on its processor time
and on the length of its text.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, Never

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from orca_common.bounded_file import SHOWN, read_bounded, shown
from orca_common.errors import FailedPrecondition

from .tokenizer_folder import TokenizerFolder
from .tool_calls import syntax_in

TEMPLATE_BYTES = 1 << 20  # of a file; those of published models have up to 20,000
DEFAULT = "default"  # the name of the template that is used, where a checkpoint has several
TOOL_USE = "tool_use"  # and of the one for requests with tools, as in transformers
RENDER_SECONDS = 1.0  # of processor time; the templates of published models take some 0.1 ms a message
ASKS_FOR_A_TEXT = ("string", "iterable", "sequence", "mapping")  # tests of jinja2
LOOK = 64  # steps of a template between looks at the clock


class CannotRender(Exception):
    """A template refused its messages, or could not go on. The sentence is for the caller."""


class ChatTemplate:
    """One template, compiled once. `render` may be called from any thread."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
        tool_use: "ChatTemplate | None" = None,
    ) -> None:
        """Raises FailedPrecondition for a text that is no template.

        special_tokens: variables of every rendering, as `bos_token`. now: the local time, for templates with a date.
        tool_use: the checkpoint's template for requests with tools, where that is another one.
        """
        self.tool_use = tool_use or self
        self._special_tokens = special_tokens
        # Many templates know no developer; some would leave the message out without a word.
        self.knows_developer = "developer" in source
        self.knows_calls = "tool_calls" in source  # those of the messages
        self.takes_tools = re.search(r"\btools\b", source) is not None
        self.syntax = syntax_in(source) if self.takes_tools else None
        try:
            made = environment(now)
            self._template = made.from_string(source)
            self.walks_parts = walks_parts(made.parse(source))
        except (TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise FailedPrecondition(f"model: its chat template is not valid ({str(error)[:SHOWN]})") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        max_length: int,
        *,
        seconds: float = RENDER_SECONDS,
    ) -> str:
        """The text of a prompt that ends where the assistant's answer begins. Raises CannotRender.

        messages: what OpenAI's API calls so, of plain JSON. variables: more of them for the template; they win over
        those that it always has. max_length: characters of the text. seconds: of this thread's processor time.
        """
        always = {"tools": None, "documents": None, "add_generation_prompt": True}
        pieces, length = list[str](), 0
        try:
            with bounded(seconds):
                given = {**self._special_tokens, **always, **variables, "messages": [dict(one) for one in messages]}
                for piece in self._template.generate(given):
                    pieces.append(piece)
                    length += len(piece)
                    if length > max_length:
                        raise CannotRender(f"the model's chat template makes more than {max_length} characters of them")
        except Refused as error:
            raise CannotRender(f"the model's chat template refuses them: {str(error)[:SHOWN]}") from None
        except TooSlow:
            raise CannotRender(f"the model's chat template took more than {seconds:g} s for them") from None
        except Exception as error:  # whatever a stranger's program may raise
            if isinstance(error, CannotRender):
                raise
            problem = f"{type(error).__name__}: {str(error)[:SHOWN]}"
            raise CannotRender(f"the model's chat template cannot make a prompt of them ({problem})") from None
        return "".join(pieces)


def walks_parts(tree: nodes.Template) -> bool:
    """Whether a template goes through the parts of a message's content, and never asks whether it is a text.

    Such a template makes nothing of a text, or of its letters. Others get texts, as those who wrote them expect."""

    def is_content(node: nodes.Node | None) -> bool:
        while isinstance(node, nodes.Filter):  # as in `m.content | selectattr(..)`
            node = node.node
        match node:
            case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
                return True
            case nodes.Name(name=name):
                return name in named
            case _:
                return False

    named = {"content"}  # a macro's parameter, in many templates
    for assigned in tree.find_all(nodes.Assign):
        if isinstance(assigned.target, nodes.Name) and is_content(assigned.node):
            named.add(assigned.target.name)
    tested = any(test.name in ASKS_FOR_A_TEXT and is_content(test.node) for test in tree.find_all(nodes.Test))
    return not tested and any(is_content(loop.iter) for loop in tree.find_all(nodes.For))


def read_chat_template(folder: Path, now: Callable[[], datetime] = datetime.now) -> ChatTemplate | None:
    """The template of a checkpoint folder; None where it has none. Raises FailedPrecondition with a sentence."""
    tokenizer = TokenizerFolder(folder)
    config = tokenizer.config
    sources = template_sources(folder, config)
    if not sources:
        return None
    if DEFAULT not in sources:
        names = ", ".join(sorted(sources))
        raise FailedPrecondition(f"model: {folder} has chat templates ({names}), but none is named {DEFAULT!r}")
    tokens = tokenizer.named
    tool_use = ChatTemplate(sources[TOOL_USE], tokens, now) if TOOL_USE in sources else None
    return ChatTemplate(sources[DEFAULT], tokens, now, tool_use)


def template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The templates by their names. Files of their own win over those of tokenizer_config.json, as in transformers.

    config: tokenizer_config.json, where `chat_template` is one text, or a list of objects with `name` and `template`.
    """
    found: dict[str, str] = {}
    with suppress(FileNotFoundError):
        found[DEFAULT] = text_of(folder / "chat_template.jinja")
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        found[path.stem] = text_of(path)
    if found:
        return found
    match config.get("chat_template"):
        case None:
            return {}
        case str() as source:
            return {DEFAULT: source}
        case list() as several:
            for one in several:
                match one:
                    case {"name": str() as name, "template": str() as source}:
                        found[name] = source
                    case _:
                        raise FailedPrecondition(
                            f"model: {folder}: chat_template holds {shown(one)}, no named template"
                        )
            return found
        case other:
            raise FailedPrecondition(f"model: {folder}: chat_template must be a text or a list, not {shown(other)}")


def text_of(path: Path) -> str:
    try:
        return read_bounded(path, TEMPLATE_BYTES).decode()
    except UnicodeDecodeError:
        raise FailedPrecondition(f"model: {path} is not UTF-8") from None


# -- the environment of transformers (utils/chat_template_utils.py), and the bounds


def environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """The names, filters and tags that templates are written for."""
    made = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: now().strftime(form)
    made.globals["dict"] = Dicts()
    made.globals["namespace"] = Names
    return made


class Environment(ImmutableSandboxedEnvironment):
    """Refuses products that need much memory at once; jinja2 would even compute those of constants when it compiles."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        small = abs(right) <= LOOK if operator == "**" else size_of(left) * size_of(right) <= TEMPLATE_BYTES
        if not small:
            raise SecurityError(f"{operator} would make a value that is too large")
        return super().call_binop(context, operator, left, right)


def size_of(factor: Any) -> int:
    """The growth of a product by a factor: a number's value where the other one is a text or a list."""
    if isinstance(factor, int):
        return max(abs(factor), 1)
    return len(factor) if isinstance(factor, str | list | tuple) else 1


class Generation(Extension):
    """The block tag `generation`, which marks the assistant's tokens for training: its body is shown as it is."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 wants a set here

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_shown"), [], [], body).set_lineno(line)

    def _shown(self, caller: Callable[[], str]) -> str:
        return caller()


class Refused(Exception):
    """A template has called raise_exception."""


def raise_exception(message: object) -> Never:
    raise Refused(message)


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as it is: jinja2's own filter escapes HTML and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Dicts:
    """`dict` for templates, without what its class could lead to."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class Names(Namespace):
    """`namespace` for templates. It holds no name that begins with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that a name may be `self`
        self, *given = args
        names = dict(*given, **kwargs)
        for name in names:
            check_name(name)
        Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        check_name(name)
        super().__setitem__(name, value)


def check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


class TooSlow(BaseException):
    """The time of a rendering is over. No `except Exception` of jinja2 holds it up."""


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raises TooSlow when the block takes more of this thread's processor time.

    Python calls the clock at the steps of the block: no template can go on without it, and it costs some 0.1 us a step.
    """
    end, steps = time.thread_time() + seconds, 0

    def step(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps % LOOK == 0 and time.thread_time() > end:
            raise TooSlow
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        yield
    finally:
        sys.settrace(before)
