"""What mkdocs does beyond its own: pages of source files, links to symbols in them, and the table of settings.

A page of docs/ may link to any file of the repository as a relative path. The link works on a code host and in an
editor, and in the built site too: the file is shown there as a page of its own, with its lines numbered. A fragment
names a function, class or method of a Python file, and the built link leads to its line:

    [`EngineMaster.run`](../../services/scheduler/orca_scheduler/master/master.py#EngineMaster.run)

`<!-- settings: module.Class -->` in a page becomes the table of that class's settings.
"""

import ast
import importlib
import io
import os
import re
import tokenize
from collections.abc import Iterator
from html import escape, unescape
from pathlib import Path
from typing import Any, NamedTuple

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\])\((?P<path>[^()\s#]*)(?:#(?P<fragment>[^()\s]*))?\)")
SETTINGS = re.compile(r"<!-- settings: (?P<module>[\w.]+)\.(?P<name>\w+) -->")
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
LINE_ANCHOR = re.compile(r'id="(__codelineno-[\d-]+)"')
LANGUAGES = {".py": "python", ".lua": "lua", ".proto": "protobuf", ".js": "javascript", ".toml": "toml", ".yml": "yaml"}


class Target(NamedTuple):
    """A link's end inside the repository. `symbol` is empty when the link names the file alone."""

    path: Path
    symbol: str


def targets(text: str, page: Path) -> Iterator[Target]:
    """The relative links of a page, by absolute path. `page` is the page's own file."""
    for found in LINK.finditer(without_code(text)):
        path, fragment = found["path"], found["fragment"] or ""
        if "://" in path or path.startswith("mailto:"):
            continue
        yield Target((page.parent / path).resolve() if path else page, fragment)


def without_code(text: str) -> str:
    """The text with its fenced blocks emptied: what looks like a link there is none."""
    return re.sub(r"^( *)(```+).*?^\1\2$", "", text, flags=re.DOTALL | re.MULTILINE)


def line_of(path: Path, symbol: str) -> int:
    """The line on which a Python file defines `Class`, `function` or `Class.method`. Raises KeyError."""
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    line = 0
    for name in symbol.split("."):
        found = next((node for node in body if name in defined(node)), None)
        if found is None:
            raise KeyError(f"{path.relative_to(ROOT)} defines no {symbol}")
        line, body = found.lineno, getattr(found, "body", [])
    return line


def defined(node: ast.stmt) -> set[str]:
    """The names that a statement defines."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Assign():
            return {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        case ast.AnnAssign(target=ast.Name(name)):
            return {name}
        case _:
            return set()


# -- settings


class Setting(NamedTuple):
    name: str
    kind: str
    default: str
    meaning: str


def settings_of(module: str, name: str) -> list[Setting]:
    """The settings of a class and of those it inherits from, as they are written in their files."""
    kind: Any = getattr(importlib.import_module(module), name)
    rows: dict[str, Setting] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("orca"):
            rows |= {row.name: row for row in declared(base, kind)}
    return list(rows.values())


def declared(base: type, kind: Any) -> Iterator[Setting]:
    """The fields that one class declares. Their meaning is Field's description, or the comment behind them."""
    path = Path(str(importlib.import_module(base.__module__).__file__))
    source = path.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    body = next(
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == base.__name__
    )
    for node in body.body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.target.id in kind.model_fields
        ):
            field = kind.model_fields[node.target.id]
            meaning = field.description or comments.get(node.end_lineno or node.lineno, "").lstrip("# ")
            default = "required" if field.is_required() else "not set" if field.default is None else str(field.default)
            meaning = " ".join(meaning.split())
            yield Setting(node.target.id, type_of(ast.unparse(node.annotation)), default, meaning)


def type_of(annotation: str) -> str:
    """`Annotated[int, ..] | None` as `int`."""
    known = re.search(r"Literal\[(?P<words>[^\]]*)\]|\b(?P<word>int|float|bool|str)\b|Positive", annotation)
    if known is None:
        return annotation
    return " or ".join(re.findall(r"[\w.-]+", known["words"])) if known["words"] else known["word"] or "int"


def settings_table(module: str, name: str) -> str:
    lines = ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
    for setting in settings_of(module, name):
        lines.append(f"| `{setting.name}` | {setting.kind} | `{setting.default}` | {setting.meaning} |")
    return "\n".join(lines)


# -- mkdocs calls these


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each file of the repository that some page links to."""
    linked: set[Path] = set()
    for file in files.documentation_pages():
        page = Path(str(file.abs_src_path))
        linked |= {target.path for target in targets(page.read_text(), page)}
    for path in sorted(linked):
        if path.is_file() and not path.is_relative_to(DOCS):
            files.append(File.generated(config, source_page(path), content=source_text(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to source files to their pages, and fills in tables of settings."""
    if page.file.abs_src_path is None:
        return markdown
    here = Path(page.file.abs_src_path)

    def lead(found: re.Match[str]) -> str:
        path = (here.parent / found["path"]).resolve()
        if "://" in found["path"] or not found["path"] or path.is_relative_to(DOCS) or not path.is_relative_to(ROOT):
            return found[0]
        if path.is_dir():
            return f"({os.path.relpath(DOCS / 'change.md', here.parent)}#the-map-of-the-code)"
        if not path.is_file():
            raise PluginError(f"{here.relative_to(ROOT)} links to {found['path']}, which is not there")
        link = os.path.relpath(DOCS / source_page(path), here.parent)
        if found["fragment"]:
            try:
                link += f"#__codelineno-0-{line_of(path, found['fragment'])}"
            except KeyError as error:
                raise PluginError(f"{here.relative_to(ROOT)}: {error.args[0]}") from None
        return f"({link})"

    markdown = LINK.sub(lead, markdown)
    return SETTINGS.sub(lambda found: settings_table(found["module"], found["name"]), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Tells mkdocs of the anchors of numbered lines: it looks for anchors before code is highlighted. Labels cells."""
    if page.present_anchor_ids is not None:
        page.present_anchor_ids |= set(LINE_ANCHOR.findall(html))
    return TABLE.sub(lambda found: labelled(found[0]), html)


def labelled(table: str) -> str:
    """A table whose cells name their columns: on a phone site.css shows a row as a list of them."""
    names = [
        escape(unescape(re.sub("<[^>]*>", "", head))) for head in re.findall(r"<th\b[^>]*>(.*?)</th>", table, re.DOTALL)
    ]
    rows = re.split(r"(?=<tr>)", table)
    for n, row in enumerate(rows):
        column = iter(names)
        rows[n] = re.sub(r"<td\b", lambda _, column=column: f'<td data-column="{next(column, "")}"', row)
    return "".join(rows)


def source_page(path: Path) -> str:
    return f"source/{path.relative_to(ROOT)}.md"


def source_text(path: Path) -> str:
    """A source file as a page. Markdown files outside docs/ are shown as they are written, too."""
    fence = "`" * 6
    language = LANGUAGES.get(path.suffix, "text")
    head = f"---\nsearch:\n  exclude: true\nhide: [navigation, toc]\n---\n# {path.relative_to(ROOT)}\n\n"
    return f'{head}{fence}{language} linenums="1"\n{path.read_text()}\n{fence}\n'
