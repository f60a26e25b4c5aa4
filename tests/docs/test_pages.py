"""The pages are true to the repository: links, citations, symbols, settings, errors, pictures; and the site builds."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from docs.pages import PAGES, ROOT

from orca.v1 import orca_pb2
from orca_endpoint.http.errors import STATUS
from orca_scheduler.master.journal import KINDS

DOCS = ROOT / "docs"
CITED = re.compile(r'(?P<page>docs/[\w/.-]+\.md)(?:[`]*, "(?P<title>[^"]+)")?')
# What stands outside the repository, and was cited before its pages moved in. In pieces, so that this file has none.
OUTSIDE = re.compile("|".join((r"DESI" r"GN(\.md|,? sections?)", r"\.\./sha" r"red", r"refer" r"ence/\w+\.(md|py)")))
TEXT = {".py", ".md", ".lua", ".proto", ".toml", ".yml", ".yaml", ".sh", ".js", ".json", ""}


def load(path: Path) -> ModuleType:
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SITE = load(DOCS / "hooks/site.py")


def files() -> list[Path]:
    """The text files that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    named = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    paths = [ROOT / name for name in named]
    return [path for path in paths if path.suffix in TEXT and path.is_file() and "corpus" not in path.parts]


def anchors(page: Path) -> set[str]:
    """The fragments that a page's headings have."""
    headings = re.findall(r"^#+ (.+)$", SITE.without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for path, fragment in SITE.targets(page.read_text(), page):
        if not path.exists():
            broken.append(f"{os.path.relpath(path, ROOT)} is not there")
        elif fragment and path.suffix == ".py":
            try:
                SITE.line_of(path, fragment)
            except KeyError as error:
                broken.append(str(error.args[0]))
        elif fragment and path.suffix == ".md" and fragment not in anchors(path):
            broken.append(f"{os.path.relpath(path, ROOT)} has no heading #{fragment}")
    assert not broken, "\n".join(broken)


def test_citations_in_the_code_name_pages_and_titles() -> None:
    """`docs/engines.md, "Verdicts"` in a comment: the page is there, and one of its titles begins so."""
    broken = []
    for file in files():
        for found in CITED.finditer(file.read_text()):
            page = ROOT / found["page"]
            titles = re.findall(r"^#+ (.+)$|\*\*(.+?)\.?\*\*", page.read_text(), re.MULTILINE) if page.exists() else []
            known = any(title.startswith(found["title"] or "") for pair in titles for title in pair if title)
            if not known:
                broken.append(f"{file.relative_to(ROOT)} cites {found[0]}")
    assert not broken, "\n".join(broken)


def test_nothing_cites_a_page_outside_the_repository() -> None:
    outside = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files()
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if OUTSIDE.search(line)
    ]
    assert not outside, "\n".join(outside)


def test_the_table_of_errors_is_the_code_s() -> None:
    rows = re.findall(r"^\| ([A-Z_]+) \| (\d+) \| `(\w+)` \|", (DOCS / "call.md").read_text(), re.MULTILINE)
    assert {name: int(status) for name, status, _ in rows} == {name: status for name, (status, _) in STATUS.items()}
    assert all(kind.lower() == name.replace("_", "").lower() for name, _, kind in rows)


def test_settings_of_the_pages_have_the_code_s_defaults() -> None:
    known = {}
    for module, name in SITE.SETTINGS.findall((DOCS / "operate.md").read_text()):
        settings = SITE.settings_of(module, name)
        assert all(setting.meaning for setting in settings), f"{name}: a setting without a word about it"
        known |= {setting.name: setting.default for setting in settings}
    rows = re.findall(
        r"^\| (`\w+`(?:, `\w+`)*) \| ([^|:]+)(?:: [^|]*)? \|", (DOCS / "operate.md").read_text(), re.MULTILINE
    )
    said = {}
    for names, defaults in rows:
        listed, values = names.replace("`", "").split(", "), defaults.split(", ")
        said |= dict(zip(listed, values * len(listed) if len(values) == 1 else values, strict=True))
    assert {"retention", "retain_bytes", "tenant_requests", "max_batch_size"} <= said.keys()
    exact = {name: known[name].removesuffix(".0") for name in said}
    assert {name: default.removesuffix(".0") for name, default in said.items()} == exact


def test_cells_name_their_columns() -> None:
    """A phone shows a row of a wide table as a list."""
    table = (
        "<table><thead><tr><th>a</th><th><code>b</code> &amp; c</th></tr></thead><tr><td>1</td><td>2</td></tr></table>"
    )
    cells = '<td data-column="a">1</td><td data-column="b &amp; c">2</td>'
    assert SITE.labelled(table) == re.sub("<td>.*</td>", cells, table)


def test_the_table_of_keys_is_the_docstring_s() -> None:
    page = (DOCS / "pool.md").read_text()
    assert page == load(DOCS / "hooks/keys.py").page(), "run docs/hooks/keys.py"
    assert page.count("| `tokens:ID` | string |") == 1, "the marks are there, and the table is between them"


def test_the_kinds_of_a_journal_are_those_of_the_code() -> None:
    page = (DOCS / "journal.md").read_text()
    assert page == load(DOCS / "hooks/journal.py").page(), "run docs/hooks/journal.py"
    listed = re.findall(r"^\| `([A-Z]\w+)` \|", page, re.MULTILINE)
    assert sorted({*listed}) == sorted(KINDS)


@pytest.mark.parametrize("word", ["llama", "prometheus", "chat", "quantized", "autoscaling"])
def test_the_search_finds(word: str) -> None:
    """The words that newcomers look for, as whole words."""
    assert any(re.search(rf"\b{word}\b", page.read_text(), re.IGNORECASE) for page in DOCS.glob("*.md"))


def test_the_table_of_metrics_is_that_of_the_services() -> None:
    page = (DOCS / "metrics.md").read_text()
    assert page == load(DOCS / "hooks/metrics.py").page(), "run docs/hooks/metrics.py"
    assert page.count("| `orca_build_info` | gauge |") == 1, "the marks are there, and the table is between them"


def test_the_table_of_methods_is_the_contract_s() -> None:
    """A row for each method, in the contract's order. A cell that names fields names all of them, and so do braces."""
    page = (DOCS / "design.md").read_text()
    rows = re.findall(r"^\| `([A-Z]\w+)` \|([^|]*)\|([^|]*)\|$", page, re.MULTILINE)
    methods = orca_pb2.DESCRIPTOR.services_by_name["Orca"].methods
    assert [name for name, _, _ in rows] == [method.name for method in methods]
    for method, (_, *cells) in zip(methods, rows, strict=True):
        for message, cell in zip((method.input_type, method.output_type), cells, strict=True):
            told = dict(re.findall(r"`([a-z_]+)`(?: \{([^}]*)\})?", cell))
            assert not told or set(told) - set(message.oneofs_by_name) == set(message.fields_by_name), cell
            inner = {name: set(re.findall(r"`([a-z_]+)`", text)) for name, text in told.items() if text}
            kinds = {name: message.fields_by_name[name].message_type for name in inner}
            assert inner == {name: set(kind.fields_by_name if kind else ()) for name, kind in kinds.items()}


def test_pictures_are_drawn() -> None:
    draw = load(DOCS / "pictures/draw.py")
    drawn = {f"{name}.svg": picture for name, picture in draw.PICTURES.items()}
    assert drawn == {path.name: path.read_text() for path in (DOCS / "pictures").glob("*.svg")}, (
        "run docs/pictures/draw.py"
    )


@pytest.mark.long  # `make examples`
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Not --quiet: then mkdocs counts no warning, and --strict refuses nothing."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stderr, built.stderr
    pages = list(tmp_path.rglob("*.html"))
    elsewhere = re.compile(
        r'<(?:script|img|iframe)[^>]* src="https?://|<link[^>]* rel="stylesheet"[^>]* href="https?://'
    )
    fetched = [str(page) for page in pages if elsewhere.search(page.read_text())]
    assert pages
    assert not fetched, f"pages that fetch scripts or styles from elsewhere: {fetched}"
