"""Writes the chart's README.md, which `helm show readme` prints, from Chart.yaml and the prose of values.yaml."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

CHART = Path(__file__).parents[1] / "helm"
HEADING = re.compile(r"# -- (.+?) -*$")
VALUE = re.compile(r"( *)([A-Za-z]\w*):(?: (.*))?$")
BEGIN = """# orca

{description}

```bash
helm install orca oci://HOST/PATH/orca -f my-values.yaml --set image.registry=HOST/PATH --wait --version {version}
```

`docs/kubernetes.md` in the repository says how to install, upgrade and observe it. These are all values, from
`values.yaml`; `values.schema.json` checks their names and types.
"""


class Value(NamedTuple):
    path: str
    default: str
    prose: str


def values(text: str) -> Iterator[str | Value]:
    """The sections and the values in them. A comment belongs to the value right below it."""
    above: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        if heading := HEADING.match(line):
            yield heading[1]
            comment = []
        elif line.lstrip().startswith("#"):
            comment.append(line.lstrip(" #"))
        elif value := VALUE.match(line):
            depth = len(value[1]) // 2
            above = [*above[:depth], value[2]]
            default = re.sub(r"  #.*", "", value[3] or "")
            if default or comment:
                yield Value(".".join(above), default, " ".join(comment))
            comment = []
        else:
            comment = []


def readme() -> str:
    """The whole page."""
    page = [BEGIN.format(**yaml.safe_load((CHART / "Chart.yaml").read_text()))]
    for found in values((CHART / "values.yaml").read_text()):
        if isinstance(found, str):
            page.append(f"\n## {found}\n\n| value | default | meaning |\n| --- | --- | --- |\n")
        else:
            default = f"`{found.default}`" if found.default else ""
            prose = found.prose.replace("|", "\\|")
            page.append(f"| `{found.path}` | {default} | {prose} |\n")
    return "".join(page)


if __name__ == "__main__":
    (CHART / "README.md").write_text(readme())
