"""`orca doctor` as a command: on what the chart renders, and without a cluster that answers."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli.installation import CHART, GPUS, chart_text
from typer.testing import CliRunner

from orca_cli.main import app
from orca_local.embedded_pool import keep_port

ORCA = str(Path(sys.executable).parent / "orca")


def doctor(*arguments: str, stdin: str = "", kubeconfig: Path = Path("/nowhere")) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"KUBECONFIG": str(kubeconfig), "COLUMNS": "80"}
    return subprocess.run(
        [ORCA, "doctor", *arguments],
        input=stdin, capture_output=True, text=True, timeout=60, check=False, env=environment,
    )  # fmt: skip


def doctor_here(file: Path, text: str, *arguments: str) -> Any:
    """In this process, where no cluster is asked: about a file with this text."""
    file.write_text(text)
    return CliRunner().invoke(app, ["doctor", "--rendered", str(file), *arguments], env={"COLUMNS": "80"})


@pytest.mark.parametrize("jaeger", [False, True])
def test_the_chart_is_in_order(jaeger: bool, tmp_path: Path) -> None:
    cpu = yaml.safe_load((CHART / "values-cpu.yaml").read_text())
    text = chart_text(cpu | {"image": {"tag": "1.2.3"}, "jaeger": {"enabled": jaeger}})
    ended = doctor_here(tmp_path / "orca.yaml", text)
    assert (ended.exit_code, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    assert lines[-1] == f"{len([line for line in lines if line.startswith('ok ')])} ok"
    assert max(map(len, lines)) <= 80


def test_a_fault_is_the_exit_status() -> None:
    text = chart_text(GPUS).replace("podManagementPolicy: Parallel", "podManagementPolicy: OrderedReady")
    ended = doctor("--rendered", "-", "--json", stdin=text)
    assert (ended.returncode, ended.stderr) == (1, "")
    [fault] = [finding for finding in json.loads(ended.stdout) if finding["level"] == "fault"]
    assert fault["check"] == "updates"
    assert fault["advice"].startswith("set podManagementPolicy Parallel")


def test_several_releases(tmp_path: Path) -> None:
    file, text = tmp_path / "both.yaml", f"{chart_text(GPUS, 'orca')}\n---\n{chart_text(GPUS, 'second')}"
    ended = doctor_here(file, text)
    assert (ended.exit_code, ended.stderr) == (
        1, f"--rendered: {file} holds the releases orca, second; name one by --release\n"
    )  # fmt: skip
    assert doctor_here(file, text, "--release", "second").exit_code == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "is empty"), ("{", "cannot be read as YAML"), ("a: 1", "holds no workload of a release")],
)
def test_no_rendered_chart(tmp_path: Path, text: str, says: str) -> None:
    ended = doctor_here(tmp_path / "orca.yaml", text)
    assert ended.exit_code == 1
    assert says in " ".join((ended.stdout + ended.stderr).split())


def test_no_cluster() -> None:
    ended = doctor()
    assert ended.returncode == 1
    assert ended.stderr.startswith(
        "no cluster is known (there is no kubeconfig with a current context); set KUBECONFIG;"
    )
    assert ended.stderr.endswith("; for `orca serve` on this machine: orca status\n")


def kubeconfig(folder: Path, port: int) -> Path:
    """A file that names a cluster at a port of this machine."""
    named = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{port}"}}
    context = {"name": "here", "context": {"cluster": "here", "user": "me"}}
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "here",
        "clusters": [named], "contexts": [context], "users": [{"name": "me", "user": {"token": "none"}}],
    }  # fmt: skip
    file = folder / "config"
    file.write_text(yaml.safe_dump(config))
    return file


def test_a_cluster_that_does_not_answer(tmp_path: Path) -> None:
    with keep_port() as closed:
        ended = doctor(kubeconfig=kubeconfig(tmp_path, closed.getsockname()[1]))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("the API server cannot be asked: Cannot connect")


class Strange(BaseHTTPRequestHandler):
    """Answers with a page that is neither JSON nor UTF-8."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "11")
        self.end_headers()
        self.wfile.write(b"<p>\xe9t\xe9\n</p>")

    def log_message(self, format: str, *args: object) -> None:
        """Writes nothing."""


def test_a_server_that_is_no_api_server(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Strange) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ended = doctor(kubeconfig=kubeconfig(tmp_path, server.server_port))
        server.shutdown()
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.endswith("the API server's answer cannot be read: <p>\ufffdt\ufffd </p>\n")
