"""`orca doctor` as a command: on what the chart renders, and without a cluster that answers."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cli.installation import CHART, GPUS, chart_text

ORCA = str(Path(sys.executable).parent / "orca")


def doctor(*arguments: str, stdin: str = "", kubeconfig: Path = Path("/nowhere")) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"KUBECONFIG": str(kubeconfig), "COLUMNS": "80"}
    return subprocess.run(
        [ORCA, "doctor", *arguments],
        input=stdin, capture_output=True, text=True, timeout=60, check=False, env=environment,
    )  # fmt: skip


@pytest.mark.parametrize("jaeger", [False, True])
def test_the_chart_is_in_order(jaeger: bool, tmp_path: Path) -> None:
    file = tmp_path / "orca.yaml"
    cpu = yaml.safe_load((CHART / "values-cpu.yaml").read_text())
    file.write_text(chart_text(cpu | {"image": {"tag": "1.2.3"}, "jaeger": {"enabled": jaeger}}))
    ended = doctor("--rendered", str(file))
    assert (ended.returncode, ended.stderr) == (0, "")
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


def test_several_releases() -> None:
    text = f"{chart_text(GPUS, 'orca')}\n---\n{chart_text(GPUS, 'second')}"
    ended = doctor("--rendered", "-", stdin=text)
    assert (ended.returncode, ended.stderr) == (
        1, "--rendered: - holds the releases orca, second; name one by --release\n"
    )  # fmt: skip
    assert doctor("--rendered", "-", "--release", "second", stdin=text).returncode == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "--rendered: - is empty"), ("{", "cannot be read as YAML"), ("a: 1", "holds no workload of a release")],
)
def test_no_rendered_chart(text: str, says: str) -> None:
    ended = doctor("--rendered", "-", stdin=text)
    assert ended.returncode == 1
    assert says in ended.stdout + ended.stderr


def test_no_cluster() -> None:
    ended = doctor()
    assert ended.returncode == 1
    assert ended.stderr.startswith(
        "no cluster is known (there is no kubeconfig with a current context); set KUBECONFIG;"
    )
    assert ended.stderr.endswith("; for `orca serve` on this machine: orca status\n")


def test_a_cluster_that_does_not_answer(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    named = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{port}"}}
    context = {"name": "here", "context": {"cluster": "here", "user": "me"}}
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "here",
        "clusters": [named], "contexts": [context], "users": [{"name": "me", "user": {"token": "none"}}],
    }  # fmt: skip
    file = tmp_path / "config"
    file.write_text(yaml.safe_dump(config))
    ended = doctor(kubeconfig=file)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("the API server does not answer: Cannot connect")
