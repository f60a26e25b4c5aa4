"""The workflows of a public CI: they run targets that exist, in shell that parses, and name no registry."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
HOST = re.compile(r"\b[a-z0-9-]+(?:\.[a-z0-9-]+)*\.(?:io|com|org|dev|net)\b")
KNOWN = {"github.com"}  # of Go modules


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    scripts = [step["run"] for step in steps(path) if "run" in step]
    assert scripts
    for script in scripts:
        plain = re.sub(r"\$\{\{.*?\}\}", "x", script)  # an expression of GitHub's, which is text before bash sees it
        subprocess.run(["bash", "-n"], input=plain, text=True, check=True)
        named = re.findall(r"\bmake ([a-z-]+)", script)
        assert set(named) <= targets
    # `org.opencontainers.image.source` is a label.
    text = re.sub(r"org\.opencontainers\.[a-z.]+", "", path.read_text())
    assert set(HOST.findall(text)) <= KNOWN, "a registry is a variable"


def test_a_release_is_signed_and_has_a_provenance() -> None:
    workflow = ROOT / ".github/workflows/release.yml"
    (job,) = yaml.safe_load(workflow.read_text())["jobs"].values()
    assert job["permissions"]["id-token"] == "write"
    uses = [step["uses"].split("@")[0] for step in steps(workflow) if "uses" in step]
    assert "actions/attest-build-provenance" in uses
    script = "\n".join(step.get("run", "") for step in steps(workflow))
    order = ["make package", "make publish", "cosign sign --yes", "cosign attest --yes"]
    assert sorted(order, key=script.index) == order
