"""A release moves all versions by one command, or changes nothing. It runs in a copy of the tree."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from properties import first

ROOT = Path(__file__).parents[1]
WHO = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}


def run(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | WHO
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def git(folder: Path, *arguments: str) -> str:
    done = run(folder, "git", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository of its own, with the files as they are here."""
    for name in git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0"):
        if name and (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    changelog = tmp_path / "CHANGELOG.md"  # right after a release it has nothing new
    changelog.write_text(
        changelog.read_text().replace("## Unreleased\n", "## Unreleased\n\n### Added\n\n- a line\n", 1)
    )
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "as it is")
    return tmp_path


def release(tree: Path, version: str) -> subprocess.CompletedProcess[str]:
    return run(tree, sys.executable, tree / "release/version.py", version)


def versions(tree: Path) -> list[str]:
    """The version in each place that names it, each read by a reader of its own."""
    chart = yaml.safe_load((tree / "helm/Chart.yaml").read_text())
    code = "import runpy, sys; print(runpy.run_path(sys.argv[1])['VERSION'])"
    client = re.search(r'^__version__ = "(.+)"$', (tree / "client/orca_client/__init__.py").read_text(), re.MULTILINE)
    assert client is not None
    return [
        tomllib.loads((tree / "pyproject.toml").read_text())["project"]["version"],
        run(tree, sys.executable, "-c", code, tree / "services/common/orca_common/release.py").stdout.strip(),
        client[1],
        chart["version"],
        chart["appVersion"],
    ]


NOW = versions(ROOT)[0]
NEXT = f"{int(NOW.partition('.')[0]) + 1}.0.0"


def test_all_places_agree() -> None:
    assert set(versions(ROOT)) == {NOW}


def test_one_command_moves_all_versions(tree: Path) -> None:
    proto = tree / "protos/orca/v1/orca.proto"
    proto.write_text(proto.read_text().replace("message CancelRequest {", "message CancelRequest {\n  bool new = 9;"))
    git(tree, "commit", "--quiet", "--all", "--message", "a field")
    done = release(tree, NEXT)
    assert done.returncode == 0, done.stderr
    assert set(versions(tree)) == {NEXT}
    changelog = (tree / "CHANGELOG.md").read_text()
    assert re.search(rf"^## Unreleased\n\n## {NEXT} - \d{{4}}-\d\d-\d\d\n\n### Added\n", changelog, re.MULTILINE)
    contract = (tree / "protos/released.binpb").read_bytes()
    assert b"\x03new" in contract
    assert b"\x03new" not in (ROOT / "protos/released.binpb").read_bytes()
    assert git(tree, "status", "--porcelain") == ""
    assert git(tree, "describe") == f"v{NEXT}"
    changed = set(git(tree, "show", "--format=", "--name-only").split())
    assert changed == {
        "CHANGELOG.md",
        "client/orca_client/__init__.py",
        "helm/Chart.yaml",
        "helm/README.md",
        "protos/released.binpb",
        "pyproject.toml",
        "services/common/orca_common/release.py",
    }
    again = release(tree, NEXT)  # and nothing has changed since
    assert (again.returncode, again.stderr) == (1, f"release: {NEXT} was released before\n")
    git(tree, "tag", "--delete", f"v{NEXT}")
    assert release(tree, NEXT).stderr == f"release: {NEXT} was released before\n", "the changelog knows it, too"
    assert release(tree, NEXT.replace(".0", ".1")).stderr == "release: CHANGELOG.md has nothing under '## Unreleased'\n"


WRONG = [
    ("0.0.9", f"0.0.9 goes backward: the version is {NOW}"),
    ("0.02.0", "'0.02.0' is no version: it must be MAJOR.MINOR.PATCH"),
    ("0.2", "'0.2' is no version: it must be MAJOR.MINOR.PATCH"),
    ("v0.2.0", "'v0.2.0' is no version: it must be MAJOR.MINOR.PATCH"),
]


@pytest.mark.parametrize(("version", "sentence"), first(2, WRONG))
def test_a_version_that_cannot_be_next(tree: Path, version: str, sentence: str) -> None:
    refused_without_a_change(tree, version, sentence)


def test_a_tree_with_changes(tree: Path) -> None:
    (tree / "README.md").write_text("changed")
    refused_without_a_change(tree, NEXT, "the tree has changes that are not committed:\nM README.md")


def test_files_that_do_not_agree(tree: Path) -> None:
    chart = tree / "helm/Chart.yaml"
    chart.write_text(re.sub(r"\nversion: .*", "\nversion: 99.0.0", chart.read_text()))
    git(tree, "commit", "--quiet", "--all", "--message", "by hand")
    refused_without_a_change(tree, NEXT, f"the files do not agree on the version: {NOW}, 99.0.0")


def refused_without_a_change(tree: Path, version: str, sentence: str) -> None:
    before = git(tree, "rev-parse", "HEAD"), git(tree, "diff")
    done = release(tree, version)
    assert (done.returncode, done.stderr) == (1, f"release: {sentence}\n")
    assert (git(tree, "rev-parse", "HEAD"), git(tree, "diff")) == before
    assert git(tree, "tag") == ""
