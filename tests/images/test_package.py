"""The files that `make package` packs and `make publish` sends; ours stand in for buildah, syft, skopeo and helm."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from helm.chart import DEMO, main, merged, render

ROOT = Path(__file__).parents[2]
SERVICES = ("endpoint", "scheduler", "worker")
# Each writes its arguments down, and what the real one would write for the next step.
PROGRAMS = {
    "python": 'echo wheel > "$7/orca_serving-1.2.3-py3-none-any.whl"',
    "helm": 'if [ "$1" = package ]; then echo chart > "$4/orca-1.2.3.tgz"; else echo "Digest: sha256:chart"; fi',
    "buildah": """
archive=${8#oci-archive:}; archive=${archive%%:*}
echo "image $7" > "$archive"
printf 'sha256:%s' "$(sha256sum < "$archive" | cut -d' ' -f1)" > "$6"
""",
    "syft": 'for last; do :; done; echo "{}" > "${last#spdx-json=}"',
    "skopeo": 'printf sha256:image > "$5"',
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the scripts in a repository, and the programs."""
    shutil.copytree(ROOT / "release", tmp_path / "release")
    (tmp_path / "bin").mkdir()
    for name, body in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/bash\nset -eu\necho "{name} $*" >> "{tmp_path}/calls"\n{body}\n')
        program.chmod(0o755)
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "--quiet"], [*who, "commit", "--quiet", "--allow-empty", "--message", "a"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def run(tree: Path, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = {"PATH": f"{tree / 'bin'}:{os.environ['PATH']}", "PYTHON": str(tree / "bin/python")}
    command = [tree / "release" / script, *arguments]
    return subprocess.run(command, env=os.environ | path | environment, capture_output=True, text=True, check=False)


def calls(tree: Path, program: str) -> list[str]:
    lines = (tree / "calls").read_text().splitlines()
    return [line.removeprefix(f"{program} ") for line in lines if line.startswith(f"{program} ")]


def test_a_release_is_packed_and_published(tree: Path) -> None:
    packed = run(tree, "package.sh", "1.2.3", "1.2.3-cpu")
    assert packed.returncode == 0, packed.stderr
    out = tree / "build/release"
    images = [f"orca-{service}-1.2.3-cpu.{kind}" for service in SERVICES for kind in ("spdx.json", "tar")]
    others = ["orca-1.2.3-cpu-digests.yaml", "orca-1.2.3.tgz", "orca_serving-1.2.3-py3-none-any.whl"]
    assert {path.name for path in out.iterdir()} == {*images, *others, "SHA256SUMS"}
    sums = (out / "SHA256SUMS").read_text()
    assert set(re.findall(r"^[0-9a-f]{64}  (.+)$", sums, re.MULTILINE)) == {*images, *others}

    # The digests are values of the chart: it installs these very images.
    values = yaml.safe_load((out / "orca-1.2.3-cpu-digests.yaml").read_text())
    release = render(merged(DEMO, values, {"image": {"registry": "registry.example.com/team"}}))
    for service in SERVICES:
        image = main(release.pods[service])["image"]
        assert image == f"registry.example.com/team/orca-{service}:1.2.3-cpu@{values['image']['digests'][service]}"

    published = run(tree, "publish.sh", "registry.example.com/team")
    assert published.returncode == 0, published.stderr
    copies = [
        f"copy --quiet --preserve-digests --digestfile digest oci-archive:orca-{service}-1.2.3-cpu.tar "
        f"docker://registry.example.com/team/orca-{service}:1.2.3-cpu"
        for service in SERVICES
    ]
    assert calls(tree, "skopeo") == copies
    assert calls(tree, "helm")[-1] == "push orca-1.2.3.tgz oci://registry.example.com/team"
    lines = [
        f"registry.example.com/team/orca-{service}@sha256:image orca-{service}-1.2.3-cpu.spdx.json"
        for service in SERVICES
    ]
    published_as = (out / "published.txt").read_text().splitlines()
    assert published_as == [*lines, "registry.example.com/team/orca@sha256:chart"]
    run(tree, "publish.sh", "localhost:5000", PLAIN_HTTP="yes")
    assert all("--dest-tls-verify=false" in call for call in calls(tree, "skopeo")[len(copies) :])
    assert calls(tree, "helm")[-1] == "push --plain-http orca-1.2.3.tgz oci://localhost:5000"
    before = len(calls(tree, "helm"))
    run(tree, "publish.sh", "localhost:5000", IMAGES_ONLY="yes")
    assert len(calls(tree, "helm")) == before


def test_what_was_changed_after_it_was_packed_is_not_published(tree: Path) -> None:
    assert run(tree, "package.sh", "1.2.3", "1.2.3").returncode == 0
    (tree / "build/release/orca-worker-1.2.3.tar").write_text("another one")
    refused = run(tree, "publish.sh", "registry.example.com/team")
    assert refused.returncode != 0
    assert "orca-worker-1.2.3.tar: FAILED" in refused.stdout
    assert calls(tree, "skopeo") == []


def test_a_step_that_fails_ends_it(tree: Path) -> None:
    (tree / "bin/syft").write_text("#!/bin/sh\nexit 3\n")
    assert run(tree, "package.sh", "1.2.3", "1.2.3").returncode == 3
    assert not (tree / "build/release/SHA256SUMS").exists()
    assert run(tree, "publish.sh", "registry.example.com/team").returncode != 0
