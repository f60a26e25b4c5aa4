"""Reads the lines that a change adds, and names phrases that a newcomer must read twice, with better ones.

python tests/english.py [BASE]

BASE is a commit: where the branch left main, or the commit before HEAD. Lines that only moved and `code` do not count.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ["*.py", "*.md", "*.lua", "*.yaml", "*.proto", "*.cpp", "*.h", "*.tpl", ":!tests/*english.py"]
INSTEAD = {
    r'"""What\b(?!.*\?)': 'name the thing, as in "The addresses that ..", or begin with a verb: "Returns .."',
    r'(^\s*|[.;:] |# |""")Else,? ': 'write "Otherwise"',
    r"\b(is|are|was|were) none\b": 'write "there is no ..", "has no .." or "is not .."',
    r"(?i)\bso many\b": 'name the number, as in "N requests" or "this number of tokens"',
    r"(?i)\bnobody\b": 'name who it is, as in "no client", or use the passive',
    r"(?i)\bwhoever\b": 'name who it is, as in "the caller that .." or "each process that .."',
    r"\bthat one\b": 'repeat the noun, as in "that rank"',
    r"\b(tell|tells|telling|told) of\b": 'write "reports" or "says that"',
    r"(?i)\bhears?\b": 'write "receives" or "is answered"',
    r"\b(is|are|was|were|be|been) told\b": 'say who sends it, as in "the master sends the rank its term"',
}


def added(diff: str) -> Iterator[tuple[str, str]]:
    """The lines that a diff without context adds, each with its `file:line`. A line that it also removes has moved."""
    removed = {line[1:].strip() for line in diff.splitlines() if line.startswith("-")}
    path, numbers = "", count()
    for line in diff.splitlines():
        if line.startswith("+++ "):
            path = line[4:].removeprefix("b/")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)", line):
            numbers = count(int(hunk[1]))
        elif line.startswith("+"):
            number = next(numbers)
            if line[1:].strip() not in removed:
                yield f"{path}:{number}", re.sub(r"`[^`]*`", "``", line[1:])


def findings(diff: str) -> list[str]:
    """A sentence for each phrase: where it is, the phrase, and what to write instead."""
    read = ((place, re.search(phrase, text), INSTEAD[phrase]) for place, text in added(diff) for phrase in INSTEAD)
    return [f"{place}: {match[0].strip()!r}: {advice}" for place, match, advice in read if match]


def git(*arguments: str) -> str:
    """Returns what git prints: nothing where it fails, as in a clone without the commit before."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    fork = git("merge-base", "HEAD", "origin/main") or git("merge-base", "HEAD", "main")
    base = "HEAD~1" if fork in ("", git("rev-parse", "HEAD")) else fork
    sys.exit("\n".join(findings(git("diff", "-U0", sys.argv[1] if sys.argv[1:] else base, "--", *FILES))) or 0)
