"""`orca` itself: its version, what it needs, completion, and what it shows of a run that has ended."""

import http.server
import io
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
import tomllib
from contextlib import suppress
from importlib.metadata import requires
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO, cast
from unittest.mock import ANY

import pytest
from packaging.requirements import Requirement
from rich.console import Console
from typer.testing import CliRunner

from orca_cli import looking, runs, serving
from orca_cli.bench import load_table
from orca_cli.chaos import Plan
from orca_cli.generate import addresses_here
from orca_cli.looking import EngineSight, Look
from orca_cli.main import app
from orca_cli.reflexes import OTHERS, SAME, understood
from orca_cli.runs import logs_of, run_folder, state_of
from orca_cli.settings import quiet_grpc
from orca_cli.settings_command import KINDS, settings_of
from orca_cli.stdout import Lossy
from orca_cli.top import View, engine_table
from orca_cli.topology import shape, size, span
from orca_client import __version__
from orca_common.environment import VERBOSITY, child_environment
from orca_common.errors import FailedPrecondition
from orca_local.run_folder import RunFolder, new_run
from orca_local.settings import ServeSettings

ROOT = Path(__file__).parents[2]
PLAIN = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}


def orca(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orca_cli", *arguments]
    environment = PLAIN | variables
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)


def test_version() -> None:
    assert orca("--version").stdout == f"orca {__version__}\n"
    assert orca("version").stdout == f"orca {__version__}\n"
    assert "generate" in orca("help").stdout


def test_grpc_is_as_quiet_as_the_services_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """They inherit the level of `orca`: C-core's plain lines must not come into their logs of JSON."""
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    quiet_grpc()
    assert child_environment({})["GRPC_VERBOSITY"] == VERBOSITY["GRPC_VERBOSITY"] == "NONE"


def test_the_exit_codes_of_the_documentation() -> None:
    """130 has its test in tests/client/test_generate_command.py."""
    listed = re.findall(r"^\| (\d+) \|", (ROOT / "docs/run.md").read_text(), re.MULTILINE)
    assert listed == ["0", "1", "2", "130"]
    lines = (["--version"], ["logs", "--run-dir", "/nowhere"], ["nosuch"])
    assert [CliRunner().invoke(app, line).exit_code for line in lines] == [0, 1, 2]


# -- installations with a part of the packages


def distributions(extras: set[str]) -> set[str]:
    """What pip installs for some extras of ours: names of distributions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    todo = [Requirement(text) for text in project["dependencies"] + [t for extra in extras for t in optional[extra]]]
    found: set[str] = set()
    while todo:
        wanted = todo.pop()
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        name = wanted.name.lower().replace("_", "-")
        if name not in found:
            found.add(name)
            todo += map(Requirement, requires(wanted.name) or [])
    return found


INSTALLED_ONLY = """
import sys
import threading
from importlib.metadata import packages_distributions
there = set(sys.argv.pop(1).split(","))
known = {top: {d.lower().replace("_", "-") for d in names} for top, names in packages_distributions().items()}
class Absent:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in known and not top.startswith("orca") and there.isdisjoint(known[top]) and name != "google":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""


def orca_with(extras: set[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    program = INSTALLED_ONLY + "from orca_cli.__main__ import main\nmain()\n"
    names = ",".join(distributions(extras))
    command = [sys.executable, "-c", program, names, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=PLAIN, timeout=60, check=False)


@pytest.mark.parametrize(
    ("extras", "command", "extra"),
    [(set(), "generate", "cli"), ({"cli"}, "serve", "serve"), ({"cli"}, "bench", "bench")],
)
def test_what_is_missing_is_named(extras: set[str], command: str, extra: str) -> None:
    done = orca_with(extras, *command.split())
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"{' '.join(['orca', *command.split()])}: ")
    assert done.stderr.endswith(f" is not installed; pip install 'orca-serving[{extra}]' brings it\n"), done.stderr


INTERRUPTED = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "orca_cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from orca_cli.__main__ import main
main()
"""


def test_ctrl_c_while_it_imports() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, env=PLAIN, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_no_fork_server_begins_where_it_could_import_nothing() -> None:
    """Its traceback would stand beside the command's sentence."""
    ours = [path for path in sys.path if Path(path).is_relative_to(ROOT) and "site-packages" not in path]
    program = (
        f"import sys; sys.path[:0] = {ours}; from orca_cli.__main__ import begin_forks; print(begin_forks(['serve']))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_generate_from_a_laptop() -> None:
    """The extra `cli` has all that `orca generate` needs, and no torch."""
    assert "torch" not in distributions({"cli"})
    done = orca_with({"cli"}, "generate", "--address", "127.0.0.1:1", "hello")
    assert done.stderr == "127.0.0.1:1: nobody listens there; `orca serve` starts a server\n"
    assert "generate" in orca_with({"cli"}, "--help").stdout


def test_the_client_needs_no_extra() -> None:
    program = INSTALLED_ONLY + "import orca_client\nprint(orca_client.__version__)"
    command = [sys.executable, "-c", program, ",".join(distributions(set()))]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{__version__}\n"


# -- completion


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("orca serve --max-wai", {"--max-waiting", "--max-waiting-bytes"}),
        ("orca serve --dtype ", {"auto", "float32", "bfloat16", "float16"}),
    ],
)
def test_completion(typed: str, offered: set[str]) -> None:
    words = typed.split(" ")
    done = orca(_ORCA_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(len(words) - 1))
    assert set(done.stdout.split()) == offered


# -- certificates


def test_certificates_made_anew(tmp_path: Path) -> None:
    """It replaced those of a running release without a word."""
    first, second = (CliRunner().invoke(app, ["certs", str(tmp_path / "ca")]) for _ in range(2))
    assert first.exit_code == second.exit_code == 0
    anew = "the authority is the one that was there; all certificates and keys are new\n"
    assert anew not in first.stderr
    assert second.stderr.startswith(anew)


# -- what `orca serve` says to try


def test_a_command_that_can_be_pasted(tmp_path: Path) -> None:
    """It lacked the program's folder, and where keys are needed their option."""
    program = tmp_path / "my bin/orca"
    program.parent.mkdir()
    program.touch(0o755)
    settings = ServeSettings.load(tls_dir="certs", api_keys_file="keys")
    said = shlex.split(serving.example("127.0.0.1:1", settings, str(program)))
    secrets = ["--tls-dir", str(Path("certs/client").absolute()), "--api-key-file", "FILE_WITH_YOUR_KEY"]
    assert said == [str(program), "generate", "def main(", "--address", "127.0.0.1:1", *secrets]
    said = serving.example("127.0.0.1:1", ServeSettings.load(), "/nowhere/__main__.py")
    assert said == "orca generate 'def main(' --address 127.0.0.1:1"
    assert serving.example("127.0.0.1:50051", ServeSettings.load(), "orca") == "orca generate 'def main('"
    ids = serving.example("127.0.0.1:50051", ServeSettings.load(), "orca", text=False)
    assert ids == "orca generate --token-ids 1,2,3 --json", "a model without a tokenizer refuses text"
    assert serving.example("127.0.0.1:50051", ServeSettings.load(), "orca", chats=True) == "orca chat"


def test_a_command_that_can_be_pasted_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It kept a relative path of the program."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/orca").touch(0o755)
    monkeypatch.chdir(tmp_path / "bin")
    said = serving.example("127.0.0.1:50051", ServeSettings.load(), "../bin/orca")
    assert said == f"{tmp_path}/bin/orca generate 'def main('"


# -- what commands hand on

HANDED: list[tuple[str, str, tuple[Any, ...]]] = [  # a command, who carries it out, and with what
    ("wait", "orca_cli.waiting.wait_for", ("orca", None, None, 600.0, 30.0)),
    (
        "wait --release r -n ns --context c --timeout 5 --patience 6",
        "orca_cli.waiting.wait_for",
        ("r", "ns", "c", 5.0, 6.0),
    ),
    ("doctor", "orca_cli.doctor.command.check_cluster", (None, None, None, None)),
    (
        "doctor --release r -n ns --context c --redis-url redis://a:1",
        "orca_cli.doctor.command.check_cluster",
        ("r", "ns", "c", "redis://a:1"),
    ),
    ("chaos --pp 1", "orca_cli.chaos.on_this_machine", (Plan(1, 20, 1, 12, ()), ["--pp", "1"], ANY)),
    (
        "chaos --release r -n ns --address a:1 --address b:1 --redis-url redis://c:1 --only rank --record f",
        "orca_cli.chaos.on_a_cluster",
        (Plan(1, 20, 1, 12, ("rank",), Path("f")), "r", "ns", ["a:1", "b:1"], "redis://c:1", ANY),
    ),
    ("top --status a:1 --status b:1", "orca_cli.top.run", (None, ["a:1", "b:1"], 1.0)),
    ("top --status a:1 --interval 3", "orca_cli.top.run", (None, ["a:1"], 3.0)),
    ("demo", "orca_cli.serving.demo", (None,)),
    ("demo --kill", "orca_cli.serving.demo_of_kills", (None,)),
]


@pytest.mark.parametrize(("line", "name", "arguments"), HANDED, ids=[line for line, *_ in HANDED])
def test_options_are_handed_on(
    line: str, name: str, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[tuple[Any, ...]]()

    async def later(*given: Any) -> list[Any]:
        calls.append(given)
        return []

    monkeypatch.setattr(name, (lambda *given: calls.append(given)) if name.endswith("top.run") else later)
    done = CliRunner().invoke(app, line.split())
    assert (done.exit_code, calls) == (0, [arguments]), done.output


@pytest.mark.parametrize(
    ("name", "module", "needed"),
    [
        ("endpoint", "orca_endpoint.app", "--model m"),
        ("scheduler", "orca_scheduler.app", "--workers a:1"),
        ("worker", "orca_worker.pod.supervisor", "--model m"),
        ("ui", "orca_ui.app", "--scheduler-status a:1 --endpoint-url http://a"),
    ],
)
def test_a_service_gets_its_settings(name: str, module: str, needed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its own class, by its arguments, in its own module."""
    calls = list[Any]()
    monkeypatch.setattr(f"{module}.main", calls.append)
    assert CliRunner().invoke(app, [name, *needed.split(), "--drain-seconds", "7"]).exit_code == 0
    (settings,) = calls
    assert (type(settings), settings.drain_seconds) == (settings_of(name), 7.0)


@pytest.mark.parametrize("name", ["endpoint", "scheduler", "worker", "ui"])
def test_a_service_in_a_container_reads_its_flags(name: str) -> None:
    command = [sys.executable, "-m", f"orca_{name}", "--nosuch=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "--nosuch: there is no such setting\n")


def test_logs_are_chosen_and_cut(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    done = CliRunner().invoke(app, ["logs", "endpoint", "-n", "1", "--json"])
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["event"] == "internal error"
    assert CliRunner().invoke(app, ["logs", "-n", "0"]).stdout == ""
    done = CliRunner().invoke(app, ["journal", str(state), "--follow", "--last", "3"])
    assert (done.exit_code, "--last" in done.output) == (2, True)


# -- what is refused, and how


@pytest.mark.parametrize(
    ("option", "suggested"),
    [
        ("--queue", ""),
        ("--max-token", " (Possible options: --max-new-tokens, --max-tokens)"),
        ("--temp", " (Possible options: --temperature)"),
    ],
)
def test_only_names_that_look_alike_are_suggested(option: str, suggested: str) -> None:
    """--help was suggested for names as far from it as --queue is."""
    done = CliRunner().invoke(app, ["generate", "a", option, "1"], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert f"No such option: {option}{suggested} " in done.stderr


@pytest.mark.parametrize(("command", "meant"), [("run", "'serve', 'chat'"), ("serv", "'serve'"), ("wombat", None)])
def test_commands_are_suggested(command: str, meant: str | None) -> None:
    done = CliRunner().invoke(app, [command], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert f"No such command '{command}'." + (f" Did you mean {meant}?" if meant else " ") in done.stderr


def test_what_those_who_come_from_vllm_type() -> None:
    typed = ["Qwen/Qwen3-8B", "--tensor-parallel-size", "2", "-pp=3", "--max-num-seqs=64", "--port", "8000", "a"]
    ours = ["--model", "Qwen/Qwen3-8B", "--tp", "2", "--pp=3", "--max-batch-size=64", "--port", "8000", "a"]
    assert understood(typed) == ours
    assert understood(["--model", "m", "--tp=2"]) == ["--model", "m", "--tp=2"]
    flags = {"--" + name.replace("_", "-") for name in ServeSettings.model_fields}
    assert set(SAME.values()) <= flags
    for option, sentence in OTHERS.items():
        done = CliRunner().invoke(app, ["serve", "m", f"{option}=1"])
        assert done.exit_code == 1
        assert re.findall(r"--[a-z-]+", sentence.replace(option, "")) == [
            name for name in re.findall(r"--[a-z-]+", sentence.replace(option, "")) if name in flags
        ], "the counterparts are there"
        with pytest.raises(SystemExit, match=f"^{option}: is no option of orca serve: "):
            understood([option, "1"])


def test_the_table_of_a_load() -> None:
    line = {"case": "b4_8_8", "run": 1, "requests": 4, "errors": 0, "requests_per_s": 2.5, "first_token_ms_p50": None}
    shown = io.StringIO()
    Console(file=shown, width=140).print(load_table([line, {**line, "rate": 2.0}]))
    head, first, second = shown.getvalue().splitlines()
    assert head.split()[:5] == ["load", "requests", "errors", "requests/s", "tokens/s"]
    assert first.split() == ["b4_8_8,", "run", "1", "4", "0", "2.5", "-", "-", "-", "-"]
    assert second.startswith("2 a second")
    members = ("output_tokens_per_s", "first_token_ms_p50", "gap_ms_p50", "normalized_latency_ms_p50")
    numbers = dict(zip(members, (5, 6.5, 7, 8), strict=True))
    whole = load_table([{"rate": 1.0, "requests": 3, "errors": 1, "requests_per_s": 0.25, **numbers}])
    assert [list(column.cells) for column in whole.columns] == [
        [cell] for cell in ("1 a second", "3", "1", "0.25", "5", "6.5", "7", "8")
    ]
    assert [column.header for column in whole.columns][-3:] == [
        *("first token, ms", "between tokens, ms", "a token of all, ms"),
    ]


@pytest.mark.parametrize("width", [100, 110, 200])
def test_top_shows_its_headers_whole(width: int) -> None:
    """At 110 columns the stages' bars cut them."""
    sight = EngineSight("engine-0", None, 12, 7.5, 2, 81920, 2000000, 51.2, 4096, (0.75,) * 2, (0.25,) * 2)
    request = {"request": "chatcmpl-0123456789abcdef01234567", "engine": "engine-0", "submitted": 0, "tokens": 12}
    request |= {"max_new_tokens": 4096, "iterations": 12, "state": "decode"}
    look = Look(1.0, (), (), (request,))
    shown = io.StringIO()
    console = Console(file=shown, width=width)
    console.print(engine_table([sight]))
    console.print(View(None, (), look, look).drawn(24))
    words = ["running", "batch", "slots", "iterations/s", "tokens/s", "stages", "tokens", "iterations", "state"]
    words += ["requests/s", "errors/s"]
    for word in (*words, "in flight", "81920/2000000", "75% busy", "25% bubble"):
        assert word in shown.getvalue(), word
    assert "first\N{NO-BREAK SPACE}token" in shown.getvalue()


@pytest.mark.parametrize("command", KINDS)
def test_help_of_settings(command: str) -> None:
    """It is as that of the other commands, and has every setting with its sentence."""
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).stdout
    assert f" {command} [OPTIONS]" in shown
    words = " ".join(shown.translate(str.maketrans("╭╮╰╯─│", "      ")).split())
    for name, field in settings_of(command).model_fields.items():
        assert f"--{name.replace('_', '-')} " in words
        assert field.description in words


def test_help_says_what_a_setting_takes() -> None:
    """Numbers that may be missing were TEXT."""
    shown = CliRunner().invoke(app, ["scheduler", "--help"], env={"COLUMNS": "120"}).stdout
    types = dict(re.findall(r"(--[a-z-]+) +([A-Z]+|<bool>) ", shown))
    names = "--slots", "--max-engines", "--max-batch-size", "--retention", "--workers", "--show-prompts"
    assert [types[name] for name in names] == ["INTEGER", "INTEGER", "INTEGER", "NUMBER", "TEXT", "<bool>"]


@pytest.mark.parametrize("command", [[], ["generate"], ["status"], ["serve"], ["bench"], ["bench", "serve"]])
def test_help_is_h_too(command: list[str]) -> None:
    assert CliRunner().invoke(app, [*command, "-h"]).exit_code == 0


def test_certificates_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = CliRunner().invoke(app, ["certs", str(tmp_path / "file")])
    assert (done.exit_code, done.stderr) == (1, f"folder: {tmp_path / 'file'} cannot be written (File exists)\n")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("plot /nope --out x.svg", "/nope: no file of JSON lines (No such file or directory)"),
        (f"plot {__file__} --out /nope/x", "/nope/x: nothing was drawn (no line has a rate and a latency)"),
        ("kernels --json-file /nope/x", "--json-file: /nope/x cannot be written (No such file or directory)"),
    ],
)
def test_files_of_the_bench_that_cannot_be_had(command: str, said: str) -> None:
    done = CliRunner().invoke(app, ["bench", *command.split()])
    assert (done.exit_code, done.stderr) == (1, said + "\n")


@pytest.mark.parametrize("command", [["config"], ["topology"], ["--help"]])
def test_output_that_cannot_be_written(command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "orca_cli", *command]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (1, "standard output cannot be written (No space left on device)\n")


def test_numbers_of_sentences_have_no_colours() -> None:
    shown = orca("serve", "--model=a/1", FORCE_COLOR="1", TERM="xterm", HF_HUB_OFFLINE="1")
    assert shown.stdout == "\x1b[2ma/1 is no folder here: asking the hub\x1b[0m\n"


def test_a_server_goes_on_when_its_terminal_is_away() -> None:
    """Its disk is full, or the reader of its pipe has left: nothing that it prints may raise."""
    read, write = os.pipe()
    os.close(read)
    for path in ("/dev/full", write):
        file = open(path, "w", buffering=1)  # noqa: SIM115 (its close fails, too)
        terminal = Console(file=cast(TextIO, Lossy(file)))
        for _ in range(3):
            terminal.print("ready")
        with pytest.raises(OSError, match=r"No space left|Broken pipe"):
            file.write("ready\n")
        with suppress(OSError):
            file.close()


# -- runs


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The state folder of a user with one run, which has ended."""
    run = new_run(tmp_path / "orca/runs")
    with RunFolder(run) as folder:
        line = {"time": "2026-11-22T10:00:01.500Z", "level": "INFO", "service": "x", "logger": "y", "event": "ready"}
        failed = line | {"time": "2026-11-22T10:00:02.000Z", "level": "ERROR", "event": "internal error"}
        failed |= {"exception": "Traceback: of this"}
        folder.log("endpoint-0").write_text(f"{json.dumps(line | {'port': 7})}\n{json.dumps(failed)}\n")
        early = line | {"time": "2026-11-22T10:00:00.000Z", "event": "started"}
        folder.log("scheduler-0").write_text("no JSON\n" + json.dumps(early) + "\n")
        (run / "processes.json").write_text("[]")
    return tmp_path


def test_logs(state: Path) -> None:
    """All processes in the order of time; a role alone; a role that is not there."""
    shown = orca("logs", XDG_STATE_HOME=str(state)).stdout.splitlines()
    assert shown == [
        "scheduler-0: no JSON",
        "10:00:00.000 INFO    scheduler-0: started",
        "10:00:01.500 INFO    endpoint-0: ready  port=7",
        "10:00:02.000 ERROR   endpoint-0: internal error",
        "Traceback: of this",
    ]
    (run,) = (state / "orca/runs").iterdir()
    assert [path.stem for path in logs_of(run, "endpoint")] == ["endpoint-0"]
    with pytest.raises(FailedPrecondition, match=r"^there is no log of router in .*; there is endpoint-0, sch"):
        logs_of(run, "router")
    (run / "logs/supervisor-0.log").touch()
    for role in ("supervisor", "worker", "rank"):
        assert [path.stem for path in logs_of(run, role)] == ["supervisor-0"]


def test_lines_that_are_written_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the end of a log on: a torn line when it is whole, and a log that was begun anew from its beginning."""
    log = tmp_path / "endpoint-0.log"
    log.write_text("before\n")

    def appended(text: str) -> None:
        with log.open("a") as file:
            file.write(text)

    steps = iter(("a\nb", "c\n", None))

    def wait(seconds: float) -> None:
        text = next(steps)
        appended(text) if text is not None else log.write_text("d\n")

    monkeypatch.setattr(runs, "time", SimpleNamespace(sleep=wait))
    assert list(islice(runs.new_lines([log]), 3)) == [("endpoint-0", line) for line in ("a", "bc", "d")]


def test_the_last_lines(state: Path) -> None:
    (run,) = (state / "orca/runs").iterdir()
    found = runs.last_lines(logs_of(run, None), 3)
    assert [name for name, _ in found] == ["scheduler-0", "endpoint-0", "endpoint-0"]
    assert '"event": "internal error"' in found[-1][1]


def test_ages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_started", lambda pid: time.clock_gettime(time.CLOCK_BOOTTIME) - pid - 0.5)
    assert [runs._age(pid) for pid in (0, 119, 120, 7199, 7200)] == ["0 s", "119 s", "2 min", "119 min", "2 h"]
    assert runs._age(None) == ""


def test_sizes_and_ranges() -> None:
    assert [size(count) for count in (0, 1023, 1536, 3 << 20, 5 << 30, 1 << 50)] == [
        *("0 B", "1023 B", "1.5 KiB", "3.0 MiB", "5.0 GiB", "1024.0 TiB"),
    ]
    assert [span(range(3, end)) for end in (3, 4, 6)] == ["-", "3", "3 to 5"]
    assert shape((2, 3)) == "(2, 3)"


def test_the_last_run(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    (run,) = (state / "orca/runs").iterdir()
    with RunFolder(run):  # it still runs, so a later one that has ended hides it no more
        RunFolder(new_run(state / "orca/runs")).close()
        assert run_folder(None) == run
    assert run_folder(None) != run
    monkeypatch.setenv("XDG_STATE_HOME", str(state / "empty"))
    with pytest.raises(FailedPrecondition, match=r"^there is no run in "):
        run_folder(None)
    with pytest.raises(FailedPrecondition, match=r"^/.* is no run folder of `orca serve`"):
        run_folder(state)


def test_generate_finds_the_run_as_status_does(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has ended may leave its table of processes behind."""
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    (run,) = (state / "orca/runs").iterdir()
    row = {"role": "endpoint", "name": "endpoint-0", "pid": 1, "status": None}
    (run / "processes.json").write_text(json.dumps([{**row, "address": "127.0.0.1:7"}, {**row, "address": None}]))
    assert addresses_here() == ["127.0.0.1:50051"]
    with RunFolder(run):
        assert addresses_here() == ["127.0.0.1:7"]


def test_status(state: Path) -> None:
    done = orca("status", XDG_STATE_HOME=str(state))
    assert done.returncode == 1
    assert "nothing runs in " in done.stdout


def test_status_of_services_elsewhere() -> None:
    """As on a cluster, whose processes are in no run folder. `orca status` knew none."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            told: dict[str, Any] = {"requests": requests} if self.path == "/requests" else state_told
            self.send_response(200)
            self.end_headers()
            self.wfile.write(metrics.encode() if self.path == "/metrics" else json.dumps(told).encode())

        def log_message(self, format: str, *args: object) -> None: ...

    requests = [{"submitted": 5.0}, {"submitted": 4.0}]
    metrics = (
        "orca_num_requests_waiting 2\norca_queue_oldest_age_seconds 1.5\nother 7\n"
        'orca_slots{engine="engine-0",state="free"} 6\norca_slots{engine="engine-0",state="reserved"} 10\n'
        'orca_num_requests_running{engine="engine-0"} 3\norca_recoveries_total{engine="engine-0",cause="x"} 1\n'
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        state_told = {"reason": None, "engines": {"engine-0": None}}
        lines, ready = looking.state_of([address])
        load = "load: 2 waiting (the oldest for 1.5 s), 3 running, 10 of 16 slots, 0 tokens/s, 1 recovery"
        assert (lines, ready) == ([f"{address}: ready", "engine-0: ready", load], True)
        both = looking.look([address, address])
        assert [one["submitted"] for one in both.requests] == [4.0, 4.0, 5.0, 5.0]
        assert both.value("orca_slots", "engine-0") == 32
        assert both.most("orca_num_requests_waiting") == 2, "all see the same queue"
        assert (both.silent, len(both.schedulers), "other" in both.values) == ((), 2, False)
        state_told = {"reason": None, "engines": {"engine-0": "a pod is missing"}}
        lines, ready = looking.state_of([address, "127.0.0.1:1"])
        assert not ready
        assert lines[0] == f"{address}: ready"
        assert lines[1].startswith("127.0.0.1:1: its status port does not answer")
        assert lines[2] == "engine-0: a pod is missing"
        assert "no answer from 127.0.0.1:1" in lines[3]
        server.shutdown()


def test_status_of_what_is_away(state: Path) -> None:
    """A process that is being started again had no row, so that all seemed well."""
    (run,) = (state / "orca/runs").iterdir()
    here = {"pid": os.getpid(), "address": "[2001:db8:1234:5678:9abc:def0:1234:5678]:50051"}
    rows = [
        {"role": "redis", "name": "redis", "status": None, **here},
        {"role": "endpoint", "name": "endpoint-0", "status": "127.0.0.1:1", **here, "pid": None},
        {"role": "scheduler", "name": "scheduler-0", "status": "127.0.0.1:1", **here},
    ]
    (run / "processes.json").write_text(json.dumps(rows))
    table, ready = state_of(run)
    assert not ready
    assert list(table.columns[-1].cells) == [
        "does not answer",
        "is being started again",
        "its status port does not answer (Connection refused)",
    ]
    assert [bool(age) for age in table.columns[2].cells] == [True, False, True]
    shown = io.StringIO()
    Console(file=shown, width=80).print(table)
    assert "…" not in shown.getvalue(), "all of it fits 80 columns"
    assert shown.getvalue().replace("\n", "").count("[2001:db8:1234") == 3
