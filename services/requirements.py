"""Prints what a service needs from others: `python services/requirements.py EXTRA`, one requirement a line.

The images install this list in a layer of its own, below the code. It comes from pyproject.toml, so that there is no
second list; it needs nothing but the standard library, so that it runs before anything is installed.
"""

import re
import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extra: str) -> list[str]:
    """The requirements of the project and of one of its extras. An extra that names the project itself, as in
    `orca-serving[common]`, is replaced by what it names.

    Raises KeyError for an extra that is not there.
    """
    project = tomllib.loads(pyproject.read_text())["project"]
    found = list(project["dependencies"])
    todo, done = [extra], set[str]()
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        for requirement in project["optional-dependencies"][name]:
            own = re.fullmatch(rf"{re.escape(project['name'])}\[(.+)\]", requirement)
            if own:
                todo += own[1].replace(" ", "").split(",")
            else:
                found.append(requirement)
    return sorted(set(found))


if __name__ == "__main__":
    print(*requirements(Path("pyproject.toml"), sys.argv[1]), sep="\n")
