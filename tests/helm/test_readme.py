"""`helm show readme` is made of values.yaml."""

import sys

import pytest
from helm.chart import FOLDER

sys.path.insert(0, str(FOLDER.parent / "release"))

from chart_readme import Value, readme, values


def test_the_readme_is_that_of_the_values() -> None:
    assert (FOLDER / "README.md").read_text() == readme(), "run python release/chart_readme.py"


@pytest.mark.parametrize(
    "name", ["model.path", "engine.tp", "check.enabled", "pod.securityContext.runAsUser", "test.pod"]
)
def test_it_has_each_value(name: str) -> None:
    assert f"| `{name}` |" in readme()


def test_prose_belongs_to_the_value_below() -> None:
    text = (
        "# -- A section ---\n\n# Of all.\na:\n  # Of b,\n  # as well.\n  b: {c: 1}  # aside\n\n# Of nothing.\n\nd: 2\n"
    )
    assert list(values(text)) == [
        "A section",
        Value("a", "", "Of all."),
        Value("a.b", "{c: 1}", "Of b, as well."),
        Value("d", "2", ""),
    ]
