"""What the images hold, read from the Dockerfiles; no builder is needed. Building them checks imports and torch."""

import importlib.metadata
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_imports import HOME, imports, sources

ROOT = Path(__file__).parents[2]
SERVICES = ["endpoint", "scheduler", "worker"]


def requirements(extra: str) -> list[str]:
    """The list that the images install, as services/requirements.py makes it."""
    code: dict[str, object] = {"__name__": "requirements"}
    exec((ROOT / "services/requirements.py").read_text(), code)
    found = code["requirements"](ROOT / "pyproject.toml", extra)  # type: ignore[operator]
    assert found, extra
    return found


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


@pytest.mark.parametrize("service", SERVICES)
def test_all_that_an_image_installs_is_pinned(service: str) -> None:
    lines = (ROOT / "constraints.txt").read_text().split()
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lines}
    assert installed(requirements(service), {}) <= pinned


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
