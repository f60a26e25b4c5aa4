"""Moves every version of the repository to a new one, commits it and tags the commit: `make release VERSION=0.2.0`.

It refuses a working tree with changes, a version below the present one or one that was released before, and a changelog
without a line about it. Nothing is pushed.
"""

import re
import subprocess
import sys
from datetime import UTC, date, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHANGELOG = "CHANGELOG.md"
UNRELEASED = "## Unreleased\n"
# Where a version stands: the file, and what stands around it.
PLACES = (
    ("pyproject.toml", '\nversion = "', '"\n'),
    ("services/common/orca_common/release.py", '\nVERSION = "', '"\n'),
    ("client/orca_client/__init__.py", '\n__version__ = "', '"\n'),
    ("helm/Chart.yaml", "\nversion: ", "\n"),
    ("helm/Chart.yaml", '\nappVersion: "', '"\n'),
    ("helm/README.md", " --wait --version ", "\n"),
)


class Refused(Exception):
    """The sentence says why."""


def present() -> str:
    """The version of the tree. Raises Refused when its places do not agree."""
    found = {re.search(pattern(before, after), (ROOT / file).read_text())[1] for file, before, after in PLACES}  # type: ignore[index]
    if len(found) > 1:
        raise Refused(f"the files do not agree on the version: {', '.join(sorted(found))}")
    return found.pop()


def pattern(before: str, after: str) -> str:
    return f'(?<={re.escape(before)})([^\n"]+)(?={re.escape(after)})'


def ordered(version: str) -> tuple[int, ...]:
    """The version as numbers. Raises Refused for one that is not MAJOR.MINOR.PATCH."""
    if not re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", version):
        raise Refused(f"{version!r} is no version: it must be MAJOR.MINOR.PATCH")
    return tuple(map(int, version.split(".")))


def check(version: str, changelog: str) -> None:
    """Raises Refused for a version that cannot be the next one. The first release may have the version that stands."""
    now = present()
    if ordered(version) < ordered(now):
        raise Refused(f"{version} goes backward: the version is {now}")
    if re.search(rf"^## {re.escape(version)} ", changelog, re.MULTILINE) or git("tag", "--list", tag(version)):
        raise Refused(f"{version} was released before")
    if not re.search(rf"^{UNRELEASED}\n*(?!## )\S", changelog, re.MULTILINE):
        raise Refused(f"{CHANGELOG} has nothing under {UNRELEASED.strip()!r}")


def tag(version: str) -> str:
    return f"v{version}"


def write(version: str, changelog: str, day: date) -> None:
    for file, before, after in PLACES:
        path = ROOT / file
        path.write_text(re.sub(pattern(before, after), version, path.read_text(), count=1))
    heading = f"{UNRELEASED}\n## {version} - {day.isoformat()}\n"
    (ROOT / CHANGELOG).write_text(changelog.replace(UNRELEASED, heading, 1))
    # The public contract that later ones must not break.
    subprocess.run([sys.executable, ROOT / "protos/generate.py", "--released"], check=True)


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def release(version: str) -> None:
    """Raises Refused before anything is changed."""
    changelog = (ROOT / CHANGELOG).read_text()
    if changes := git("status", "--porcelain"):
        raise Refused(f"the tree has changes that are not committed:\n{changes}")
    check(version, changelog)
    write(version, changelog, datetime.now(UTC).date())
    git("commit", "--all", "--quiet", "--message", f"Release {version}")
    git("tag", "--annotate", "--message", f"Orca {version}", tag(version))


if __name__ == "__main__":
    try:
        if len(sys.argv) != 2:
            raise Refused("say which version: make release VERSION=0.2.0")
        release(sys.argv[1])
    except Refused as refusal:
        sys.exit(f"release: {refusal}")
    print(f"committed and tagged; `git push --follow-tags` has CI build, sign and publish {sys.argv[1]}")
