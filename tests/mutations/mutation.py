"""A mutation: a one-line change that breaks a rule, and the test that defends the rule."""

import ast
from dataclasses import dataclass
from pathlib import Path

from .changes import Change, Text, changed

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutation:
    """`change` in a function or class of a file. `found_by`: the quickest test that fails then, as pytest takes it."""

    name: str
    file: str  # below the root of the repository
    where: str  # the function or class, as `f` or `Class.f`; "": the module, or a file that is not Python
    change: Change | Text
    found_by: str

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"

    def made(self, source: str) -> str:
        """The text of the file, which is `source`, with the change. Raises Gone, and SyntaxError for a change that
        makes no Python."""
        text = changed(source, self.where, self.change)
        if self.file.endswith(".py"):
            ast.parse(text)
        return text
