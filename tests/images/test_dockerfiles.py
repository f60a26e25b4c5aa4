"""What the images hold, read from the Dockerfiles; no builder is needed. Building them checks imports and torch."""

import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_imports import HOME, imports, sources

ROOT = Path(__file__).parents[2]
SERVICES = ["endpoint", "scheduler", "worker"]


def requirements(extra: str) -> list[str]:
    """What the project and one of its extras need of others. An extra that names extras stands for these."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found, todo = list(project["dependencies"]), [extra]
    while todo:
        for line in project["optional-dependencies"][todo.pop()]:
            own = re.fullmatch(rf"{re.escape(project['name'])}\[(.+)\]", line)
            if own:
                todo += own[1].split(",")
            else:
                found.append(line)
    return found


def locked(name: str) -> dict[str, tuple[str, int]]:
    """Package -> its version and how many hashes it has, in locks/NAME.txt."""
    blocks = re.split(r"\n(?=\S)", (ROOT / f"locks/{name}.txt").read_text())
    found = (re.match(r"([\w.-]+)==([^ ]+)", block) for block in blocks)
    return {
        canonicalize_name(match[1]): (match[2], block.count("--hash=sha256:"))
        for match, block in zip(found, blocks, strict=True)
        if match
    }


def installed(names: list[str], extras: dict[str, set[str]]) -> set[str]:
    """The names of the packages that these requirements bring, by what is installed here."""
    seen: set[str] = set()
    todo = [Requirement(name) for name in names]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        extras.setdefault(name, set())
        if name in seen and requirement.extras <= extras[name]:
            continue
        seen.add(name)
        extras[name] |= requirement.extras
        for line in importlib.metadata.requires(name) or []:
            inner = Requirement(line)
            if inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in {"", *extras[name]}):
                todo.append(inner)
    return seen


@pytest.mark.parametrize("name", [*SERVICES, "all", "serve", "docs"])
def test_all_that_is_installed_has_its_hash(name: str) -> None:
    """What fails here is mended by `make locks`."""
    lines = (ROOT / "constraints.txt").read_text().split()
    pinned: dict[str, str] = {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines}
    lock = locked(name)
    assert installed(requirements(name), {}) <= lock.keys()
    assert [package for package, (_, hashes) in lock.items() if not hashes] == []
    assert {package: version for package, (version, _) in lock.items() if pinned.get(package, version) != version} == {}
    assert "://" not in (ROOT / f"locks/{name}.txt").read_text(), "no registry is named"


def test_the_documentation_needs_no_torch() -> None:
    assert not {"torch", "triton", "numpy"} & locked("docs").keys()


def test_serving_needs_nothing_of_the_tests() -> None:
    assert not {"pytest", "transformers", "mkdocs", "pyright"} & locked("serve").keys()


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_installs_by_hashes(service: str) -> None:
    text = (ROOT / f"services/{service}/Dockerfile").read_text()
    assert f"COPY locks/{service}.txt /opt/orca/requirements.txt" in text
    lists = [line for line in text.splitlines() if "/opt/orca/requirements.txt" in line and "pip" in line]
    assert lists
    assert all("--require-hashes -r /opt/orca/requirements.txt" in line for line in lists)


def test_torch_is_the_workers_alone() -> None:
    assert {service for service in SERVICES if "torch" in installed(requirements(service), {})} == {"worker"}


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_holds_all_of_ours_that_its_code_imports(service: str) -> None:
    text = (ROOT / f"services/{service}/Dockerfile").read_text()
    copied = dict(re.findall(r"^COPY (\S+) lib/(\S+)$", text, re.MULTILINE))
    packages = set(copied.values())
    assert copied == {f"{HOME[package]}/{package}": package for package in packages}
    for package in packages:
        found = {i.top for path in sources(ROOT, package) for i in imports(path, ROOT / HOME[package])}
        assert found & HOME.keys() <= packages, package


def test_the_builder_is_given_what_the_dockerfiles_copy() -> None:
    """.dockerignore lists folders; a COPY of another one would fail."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    given = [line[1:] for line in lines if line.startswith("!")]
    for service in SERVICES:
        text = (ROOT / f"services/{service}/Dockerfile").read_text()
        for words in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
            for source in words.split():
                assert any(source == name or source.startswith(f"{name}/") for name in given), source


@pytest.mark.parametrize("service", SERVICES)
def test_labels_are_those_of_the_build(service: str) -> None:
    """buildah 1.28 takes a LABEL with an argument from its cache, with the value that an older build gave it."""
    text = (ROOT / f"services/{service}/Dockerfile").read_text()
    (labels,) = re.findall(r"^LABEL (?:.*\\\n)*.*$", text, re.MULTILINE)
    assert "$" not in labels
    command = ["make", "--dry-run", f"image-{service}", "BUILD=builder"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"--label org.opencontainers.image.version={version} " in said
    assert f"--label org.opencontainers.image.revision={head.strip()}" in said
