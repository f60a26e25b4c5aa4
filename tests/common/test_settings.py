"""Settings: the order of their sources, the sentences about wrong ones, and what a child process gets."""

import json
import logging
import re
from pathlib import Path

import pytest

from orca_common.environment import child_environment
from orca_common.settings import KNOWN, Settings
from orca_endpoint.settings import EndpointSettings
from orca_local.settings import DECIDED, ServeSettings, StackSettings
from orca_scheduler.settings import SchedulerSettings
from orca_ui.settings import UiSettings
from orca_worker.settings import RankSettings, SupervisorSettings

KINDS = [EndpointSettings, SchedulerSettings, SupervisorSettings, RankSettings, UiSettings, ServeSettings]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of the developer's own."""
    for name in KNOWN:
        monkeypatch.delenv(f"ORCA_{name.upper()}", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "orca.toml"
    path.write_text('model = "of the file"\nmax_waiting = 3\nmax_calls = 3\nport = 3\ntp = 2\n')
    return path


def refusal(kind: type[Settings], *arguments: str) -> str:
    with pytest.raises(SystemExit) as raised:
        kind.load(arguments)
    assert isinstance(raised.value.code, str), "it is printed on standard error, and the status is 1"
    return raised.value.code


def test_the_order_of_sources(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags, then the environment, then the file, then defaults; the file may be named by a flag or a variable."""
    monkeypatch.setenv("ORCA_MAX_CALLS", "4")
    monkeypatch.setenv("ORCA_PORT", "4")
    arguments = ["--port", "5", "--config", str(file)]
    settings = EndpointSettings.load(arguments)
    found = settings.model, settings.max_waiting, settings.max_calls, settings.port, settings.max_prompts
    assert found == ("of the file", 3, 4, 5, 2048)
    origins = settings.origins(arguments)
    assert [origins[name] for name in ("model", "max_calls", "port", "max_prompts", "config")] == [
        *(str(file), "ORCA_MAX_CALLS", "--port", "default", "--config")
    ]
    monkeypatch.setenv("ORCA_CONFIG", str(file))
    assert EndpointSettings.load([]).max_waiting == 3
    assert EndpointSettings.load(max_waiting=6).max_waiting == 6, "given by name"
    assert EndpointSettings.load(["--max-waiting=7"], max_waiting=6).max_waiting == 7


def test_switches_and_none() -> None:
    common = ["--model", "m"]
    assert SupervisorSettings.load(common).cuda_graphs
    assert not SupervisorSettings.load([*common, "--no-cuda-graphs"]).cuda_graphs
    assert SchedulerSettings.load(["--workers", "a:1", "--slots", "none"]).slots is None


@pytest.mark.parametrize(("level", "found"), [("debug", "DEBUG"), ("Warning", "WARNING")])
def test_log_level(level: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCA_LOG_LEVEL", level)
    assert EndpointSettings.load(["--model", "m"]).log_level == found


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("ORCA_MAX_WAITNG", "5", "ORCA_MAX_WAITNG: there is no such setting; did you mean ORCA_MAX_WAITING?"),
        ("ORCA_MAX_WAITING", "many", "ORCA_MAX_WAITING: must be a whole number (it is 'many')"),
        ("ORCA_LOG_LEVEL", "loud", "ORCA_LOG_LEVEL: must be 'DEBUG', "),
        ("ORCA_CONFIG", "/nowhere.toml", "ORCA_CONFIG: /nowhere.toml cannot be read (No such file or directory)"),
    ],
)
def test_wrong_variables(variable: str, value: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    assert refusal(EndpointSettings, "--model", "m").startswith(sentence)


@pytest.mark.parametrize("variable", ["ORCA_HOME", "ORCA_QQQQ", "ORCA_REDIS_SERVICE_HOST", "ORCA_" + 7 * "MAX_WAITNG"])
def test_a_variable_of_another_program_is_a_warning(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It resembles no setting, so it is not misspelt: the service starts. Its log has the name, not the value."""
    monkeypatch.setenv(variable, "its value")
    settings = EndpointSettings.load(["--model", "m"])
    assert capsys.readouterr() == ("", ""), "a command without a log prints nothing of it"
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    settings.open_log("orca-endpoint")
    (line,) = capsys.readouterr().err.splitlines()
    said = json.loads(line)
    assert (said["level"], said["event"]) == ("WARNING", f"{variable}: there is no such setting, so it has no effect")
    assert "its value" not in line


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("ORCA_HOSTS", "ORCA_HOST"),
        ("ORCA_PROT", "ORCA_PORT"),
        ("ORCA_DEVISE", "ORCA_DEVICE"),
        ("orca_slot", "ORCA_SLOTS"),
    ],
)
def test_a_short_name_that_resembles_a_setting_stops_the_start(
    variable: str, near: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "5")
    assert refusal(EndpointSettings, "--model", "m") == (
        f"{variable.upper()}: there is no such setting; did you mean {near}?"
    )


def test_variables_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting of another service is no mistake, and neither is a variable that is not ours."""
    for name in ("ORCA_WORKERS", "ORCA_ENGINES", "OTEL_SERVICE_NAME", "ORCAS"):
        monkeypatch.setenv(name, "x")
    assert EndpointSettings.load(["--model", "m"]).model == "m"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("max_waitng = 5", "FILE: max_waitng: there is no such setting; did you mean max_waiting?"),
        ("[endpoint]\nport = 5", "FILE: [endpoint] is a table; settings stand at the top of the file, in none"),
        ('config = "other.toml"', "FILE: config: there is no such setting"),
        ("max_waiting = ", "--config: FILE cannot be read as TOML ("),
        ('max_waiting = "many"', "FILE: max_waiting: must be a whole number (it is 'many')"),
    ],
)
def test_wrong_files(text: str, sentence: str, file: Path) -> None:
    file.write_text(text)
    said = refusal(EndpointSettings, "--model", "m", "--config", str(file))
    assert said.replace(str(file), "FILE").startswith(sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--version"], "--version: there is no such setting"),
        (["--model", "m", "--max-waitng", "5"], "--max-waitng: there is no such setting; did you mean --max-waiting?"),
        (["--model", "m", "--workers=a:1"], "--workers: there is no such setting"),
        (["--model", "m", "--port"], "argument --port: expected one argument; --help lists all settings"),
        (["gpt2", "--port", "5"], "gpt2: every setting has a name; did you mean --model gpt2?"),
        (["--model", "m", "5"], "unrecognized arguments: 5; --help lists all settings"),
        (["--model", "m", "--port", "70000"], "--port: must be at most 65535 (it is '70000')"),
        ([], "--model: is required; ORCA_MODEL or the file of --config can give it too"),
    ],
)
def test_wrong_flags(arguments: list[str], sentence: str) -> None:
    assert refusal(EndpointSettings, *arguments).startswith(sentence)


def test_all_mistakes_are_told_at_once(file: Path) -> None:
    said = refusal(EndpointSettings, "--max-waiting", "x", "--port", "70000")
    assert said.splitlines() == [
        "--model: is required; ORCA_MODEL or the file of --config can give it too",
        "--port: must be at most 65535 (it is '70000')",
        "--max-waiting: must be a whole number (it is 'x')",
    ]
    said = refusal(EndpointSettings, "--max-waitng", "5", "--qqq")
    assert said.splitlines() == [
        "--max-waitng: there is no such setting; did you mean --max-waiting?",
        "--qqq: there is no such setting",
    ]
    file.write_text("max_waitng = 5\nprot = 1")
    assert len(refusal(EndpointSettings, "--config", str(file)).splitlines()) == 2


def test_settings_that_do_not_fit_together() -> None:
    sentence = refusal(SchedulerSettings, "--workers", "a:1", "--tp", "4", "--gpus-per-pod", "3")
    assert sentence == "--gpus-per-pod: 3 is no divisor of tp, 4"


def test_a_sentence_names_a_setting_as_the_user_gave_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that a child process said, which knows all its settings as variables."""
    file.write_text('model = "m"\ndtype = "float16"\n')
    monkeypatch.setenv("ORCA_DEVICE", "cuda")
    settings = ServeSettings.load(["--config", str(file), "--port", "0"])
    for sentence, said in {
        "port: cannot listen": "--port: cannot listen",
        "rank 0: device: GPU 0 is needed": "rank 0: ORCA_DEVICE: GPU 0 is needed",
        "ORCA_DTYPE: on a CPU": f"{file}: dtype: on a CPU",
        "model: m holds no config.json": f"{file}: model: m holds no config.json",
        "http_port: cannot listen": "--http-port: cannot listen",
        "endpoint-0 ended: 5": "endpoint-0 ended: 5",
    }.items():
        assert settings.said(sentence) == said


def test_the_names_of_all_services_are_known() -> None:
    assert {name for kind in KINDS for name in kind.model_fields} == KNOWN


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_has_its_meaning(kind: type[Settings]) -> None:
    assert [name for name, field in kind.model_fields.items() if not field.description] == []


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Every setting, its meaning and its default."""
    for kind in (EndpointSettings, SchedulerSettings, SupervisorSettings, ServeSettings):
        with pytest.raises(SystemExit) as raised:
            kind.load(["--help"])
        assert raised.value.code == 0
        shown = " ".join(capsys.readouterr().out.split())
        for name, field in kind.model_fields.items():
            assert f"--{name.replace('_', '-')}" in shown
            default = "required" if field.is_required() else f"default: {str(field.default).replace('None', 'none')}"
            assert f"{field.description} ({default})" in shown


def test_help_has_the_settings_of_each_part_together(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ServeSettings.load(["--help"])
    shown = capsys.readouterr().out
    headings = re.findall(r"^(\w.*):$", shown, re.MULTILINE)
    assert headings == [
        "options",
        "stack",
        "request pool",
        "every service",
        "endpoints",
        "workers",
        "schedulers",
        "live page",
    ]
    _, *parts = re.split(r"^\w.*:$", shown, flags=re.MULTILINE)
    for flag, heading in {
        "--config": "options",
        "--tp": "stack",
        "--retention": "request pool",
        "--cuda-graphs": "workers",
    }.items():
        assert [name for name, part in zip(headings, parts, strict=True) if f"\n  {flag}" in part] == [heading]


def test_a_stack_has_the_settings_of_its_services() -> None:
    """All but those that it decides for each process; and what both have has one type and default."""
    services = {name for kind in (*KINDS[:3], UiSettings) for name in kind.model_fields}
    assert services - DECIDED <= set(ServeSettings.model_fields)
    assert not DECIDED & set(ServeSettings.model_fields)
    assert set(ServeSettings.model_fields) - services == {"endpoints", "engines", "schedulers", "start_timeout", "ui"}
    own = {"api_keys", "api_keys_file", "device", "drain_seconds", "dtype", "host", "kernels", "pp", "tp"}
    for name in own:
        for kind in KINDS[:3]:
            if name in kind.model_fields:
                assert kind.model_fields[name].default == StackSettings.model_fields[name].default


def test_a_child_has_what_its_parent_decided(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It inherits no settings, and reads no file."""
    settings = SupervisorSettings.load(["--config", str(file), "--no-cuda-graphs"])
    for name, value in {"ORCA_CONFIG": str(file), "ORCA_SLOTS": "5", "OTEL_SERVICE_NAME": "x"}.items():
        monkeypatch.setenv(name, value)
    environment = child_environment(settings.environment())
    assert environment["OTEL_SERVICE_NAME"] == "x"
    assert "ORCA_CONFIG" not in environment
    assert "ORCA_SLOTS" not in environment
    for name in KNOWN:
        monkeypatch.delenv(f"ORCA_{name.upper()}", raising=False)
    for name, value in environment.items():
        if name.startswith("ORCA_"):
            monkeypatch.setenv(name, value)
    assert SupervisorSettings.load().model_dump() == settings.model_dump() | {"config": None}
