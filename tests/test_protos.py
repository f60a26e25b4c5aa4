"""The contract: its generated Python is current, other languages can use it, it keeps to buf's rules."""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from orca.v1 import orca_pb2, pool_pb2, sampling_pb2, worker_pb2
from orca_common.errors import ErrorReason
from orca_endpoint.grpc.methods import OrcaMethods
from orca_worker.rank.controller import Controller

PROTOS = Path(__file__).parents[1] / "protos"
BUF = "1.75.0"  # in the npm registry


def generated(folder: Path) -> dict[str, str]:
    """File name -> text of all generated modules and stubs."""
    return {path.name: path.read_text() for path in (folder / "orca/v1").glob("*_pb2*.py*")}


def test_generated_code_is_current(tmp_path: Path) -> None:
    subprocess.run([sys.executable, PROTOS / "generate.py", "--out", tmp_path], check=True)
    fresh, committed = generated(tmp_path), generated(PROTOS)
    assert set(fresh) == set(committed), "run `make protos`"
    stale = [name for name in fresh if fresh[name] != committed[name]]
    assert not stale, "run `make protos`"


@pytest.mark.parametrize("module", [orca_pb2, pool_pb2, sampling_pb2, worker_pb2], ids=lambda module: module.__name__)
def test_names_in_other_languages(module: object) -> None:
    options = module.DESCRIPTOR.GetOptions()  # type: ignore[attr-defined]
    assert options.go_package == "orca.serving/gen/orca/v1;orcav1"
    assert (options.java_package, options.java_multiple_files) == ("serving.orca.v1", True)
    assert options.csharp_namespace == "Orca.V1"


def test_the_comments_name_every_reason() -> None:
    """The contract says which method ends with which reason of google.rpc.ErrorInfo; docs/call.md says what to do."""
    comments = re.findall(r"\[([A-Z][^\]]*)\]", (PROTOS / "orca/v1/orca.proto").read_text())
    named = {word for comment in comments for word in re.findall(r"\b[A-Z]+(?:_[A-Z]+)*\b", comment)}
    assert named == set(ErrorReason) - {ErrorReason.UNSPECIFIED}
    page = (PROTOS.parent / "docs/call.md").read_text()
    assert [reason for reason in named if f"`{reason}`" not in page] == []


def test_every_method_tells_its_statuses() -> None:
    """In the comment above it; GetModel has those alone that stand above the service, for all methods."""
    text = (PROTOS / "orca/v1/orca.proto").read_text()
    blocks = re.findall(r"((?:^ *//.*\n)+)^ *(?:rpc|service) (\w+)", text, re.MULTILINE)
    statuses = {code.name for code in grpc.StatusCode}
    told = {name: statuses & set(re.findall(r"^ *//   ([A-Z_]+) ", comment, re.MULTILINE)) for comment, name in blocks}
    assert {"INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "UNAVAILABLE", "INTERNAL"} <= told["Orca"]
    assert [name for name, some in told.items() if not some] == ["GetModel"]
    assert re.search(r"( *//.*\n)+ *uint64 epoch", text), "what an epoch is"


def test_the_servers_serve_each_method_of_the_contract() -> None:
    """The two servers that name their methods by hand; the supervisor's comes from the generated servicer."""
    served = OrcaMethods.__new__(OrcaMethods).handlers()  # the table asks nothing of the object
    for method in orca_pb2.DESCRIPTOR.services_by_name["Orca"].methods:
        path = f"/{method.containing_service.full_name}/{method.name}"
        assert served.service(Called(path)) is not None, path
    controller = worker_pb2.DESCRIPTOR.services_by_name["Controller"]
    paths = [f"/{controller.full_name}/{method.name}" for method in controller.methods]
    assert list(Controller.__new__(Controller).methods()) == paths


@dataclass
class Called:
    """A call as grpcio's table of handlers asks for it."""

    method: str
    invocation_metadata: tuple[tuple[str, str | bytes], ...] = ()


@pytest.fixture(scope="module")
def buf(tmp_path_factory: pytest.TempPathFactory) -> str:
    return buf_or_skip(tmp_path_factory.mktemp("buf"))


def breaking(buf: str, protos: Path) -> str:
    """What breaks callers of the last release, in buf's words. protos/generate.py wrote released.binpb then.

    Before the first release it is the contract of 22 November 2026, for which the examples in Go and Node were written.
    """
    released = PROTOS / "released.binpb"
    command = [buf, "breaking", ".", "--against", released, "--path", "orca/v1/orca.proto"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=protos)
    return done.stdout + done.stderr


def test_buf(buf: str) -> None:
    """buf's standard rules, and nothing that breaks callers since the last release."""
    subprocess.run([buf, "lint", PROTOS], check=True)
    assert breaking(buf, PROTOS) == ""


def test_buf_finds_what_breaks(buf: str, tmp_path: Path) -> None:
    for name in ("buf.yaml", "orca/v1/orca.proto"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = (PROTOS / name).read_text()
        (tmp_path / name).write_text(text.replace("uint32 max_new_tokens = 4;", "uint32 max_tokens = 4;"))
    assert "max_new_tokens" in breaking(buf, tmp_path)


def buf_or_skip(folder: Path) -> str:
    """The command buf: of this machine, or from its npm package."""
    if buf := shutil.which("buf"):
        return buf
    if shutil.which("npm") is None:
        pytest.skip("neither buf nor npm is installed")
    install = ["npm", "install", "--no-save", "--no-audit", "--no-fund", "--prefer-offline", f"@bufbuild/buf@{BUF}"]
    installed = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    if installed.returncode != 0:
        pytest.skip(f"npm cannot install buf here: {installed.stderr[-300:]}")
    return str(folder / "node_modules/.bin/buf")
