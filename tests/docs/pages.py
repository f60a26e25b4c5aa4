"""The pages of this repository, and their code blocks."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "examples/README.md",  # last: its last block kills processes of the stack
]
RUNNABLE = {"bash", "python"}
SHOWN = {"", "js", "json", "markdown", "text", "yaml"}  # for reading
BLOCK = re.compile(
    r"(?:^<!-- (?P<tag>run|not run): (?P<word>[^\n]+?) -->\n)?^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A fenced block. Above it may stand `<!-- run: serve -->` or `<!-- not run: REASON -->`."""

    page: Path
    line: int
    language: str
    code: str
    serves: bool  # its command runs until it is interrupted
    reason: str | None  # why it is not run here

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in BLOCK.finditer(text):
        tag, word = found["tag"], found["word"]
        assert tag != "run" or word == "serve", f"{page}: unknown tag {word!r}"
        line = text.count("\n", 0, found.start("code"))
        yield Block(page, line, found["language"], found["code"], tag == "run", word if tag == "not run" else None)
