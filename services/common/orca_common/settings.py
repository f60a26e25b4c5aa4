"""Settings: typed fields that come from flags, the environment, a TOML file and defaults, in this order.

A field `max_batch_size` is `--max-batch-size`, `ORCA_MAX_BATCH_SIZE`, and `max_batch_size` in the file. The string
below a field is its documentation: `--help` shows it.

Only this module, `environment`, `telemetry` and the `settings.py` of each service read the environment.
"""

import logging
import os
import re
import tomllib
from argparse import HelpFormatter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from . import logs
from .environment import PREFIX
from .spelling import suggestion

log = logging.getLogger(__name__)

EPILOG = "--max-batch-size 8 is also ORCA_MAX_BATCH_SIZE=8 in the environment, and max_batch_size = 8 in the file."

# The settings of all services. An image holds one service, so the names cannot be collected from the classes at run
# time. But all services of a release may share one environment and one file, so only a name that no service knows is a
# mistake. tests/common/test_settings.py holds them equal to the classes'.
NAMES = """
adapters adapters_file adapters_folder advertise_host aging allow_volatile_redis api_keys api_keys_file block_size
body_seconds call_buffer chat_tokens client_certificates comment_seconds config connection_age connection_idle
control_tokens_in_chats cors_origins cuda_graphs cuda_graphs_tp device drain_seconds dtype endpoint_url endpoints
engines finish_seconds first_gpu gpus_per_pod header_seconds host host_names http_port kernels kv_dtype local_rank
log_level max_batch_size max_body_bytes max_calls max_connections max_detach_grace max_engines max_header_bytes
max_open_calls max_peer_calls max_peer_connections max_prompt_bytes max_prompts max_stop_bytes max_stop_strings
max_stop_token_ids max_streams max_viewers max_waiting max_waiting_bytes min_engines model operators order
other_models policy pool pool_patience port ports_kept pp quantize rank_port ranks redis_password redis_replicas
redis_url retain_bytes retain_requests retention roles run_ahead run_dir scale_down_seconds scale_queue_seconds
scale_up_seconds scheduler_status schedulers served_model_name show_prompts slots start_timeout status_port
tenant_requests tenant_waiting_tokens threads tls_dir tp trace_share trace_slow trusted_proxies ui ui_port
worker_namespace worker_port worker_statefulset workers write_timeout
"""
KNOWN = frozenset(NAMES.split())
NAMED = re.compile(r"(?:(?<=^)|(?<=: ))(ORCA_[A-Z_]+|[a-z_]+)(?=: )")  # what a sentence is about
LOGIN = re.compile(r"(?<=://)[^/]*@")  # in a URL
PASSWORD = re.compile(r"(?<=[?&]password=)[^&#]*", re.IGNORECASE)  # in the query of a URL of redis-py


# What is wrong with a value, by pydantic's name of it. Its own words are about an input, and parsing.
WORDS = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "less_than_equal": "must be at most {le:g}",
    "literal_error": "must be {expected}",
    "string_type": "must be a text",
}


def fetch_header() -> str | None:
    """The HTTP header `NAME: VALUE` that a download of a model sends. A command line would show it to others."""
    return os.environ.get("FETCH_HEADER")


class Settings(BaseSettings):
    """Base of the settings of a service or a command."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        cli_avoid_json=True,
        cli_exit_on_error=False,
        cli_hide_none_type=True,
        cli_implicit_flags=True,
        cli_kebab_case=True,
        cli_parse_none_str="none",
    )

    heading: ClassVar[str] = "options"  # over what this class defines, in --help
    parts: ClassVar[tuple[type["Settings"], ...]] = ()  # other classes whose settings these are, too

    config: str | None = None
    """TOML file with settings; flags and the environment override it."""

    _names: dict[str, str] = PrivateAttr(default_factory=dict[str, str])  # of the settings, as the user gives them
    _strangers: list[str] = PrivateAttr(default_factory=list[str])

    @classmethod
    def load(cls, arguments: Sequence[str] | None = None, /, **given: Any) -> Self:
        """Settings from a command line's arguments, from what is given by name (None: not given), then
        from the environment, the file and the defaults.

        Raises SystemExit with a sentence for each wrong setting, which names it. `--help` prints all settings and ends
        with 0.
        """
        values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        names: dict[str, str] = {}
        try:
            flags: dict[str, Any] = {}
            if arguments is not None:
                values["_cli_settings_source"] = source = _parsed(cls, arguments)
                flags = source()
            strangers, misspelt = unknown_variables(os.environ)
            if misspelt:
                raise SystemExit("\n".join(misspelt))
            on_a_command_line = {name: flag(name) for name in cls.model_fields} if arguments is not None else {}
            names = on_a_command_line | _names_given(cls, flags, given)
            settings = cls(**values)
            settings._names = names
            settings._strangers = strangers
            return settings
        except SettingsError as error:
            problem = str(error).removeprefix("error parsing CLI: ")
            raise SystemExit(f"{problem}; --help lists all settings") from None
        except ValidationError as error:
            raise SystemExit("\n".join(sentence(dict(one), names) for one in error.errors())) from None

    @property
    def warnings(self) -> list[str]:
        """A sentence for each variable `ORCA_*` that is no setting and resembles none: it may be another program's."""
        return [f"{name}: there is no such setting, so it has no effect" for name in self._strangers]

    def said(self, sentence: str) -> str:
        """A sentence about a setting, `NAME: what is wrong`, with the name that the user gave.

        A command's setting that was not given is called by its flag."""
        return renamed(sentence, self._names)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, FileSource(settings_cls)

    def origins(self, arguments: Sequence[str]) -> dict[str, str]:
        """The source of each setting when it was loaded: a flag, a variable, the file or "default"."""
        kind = type(self)
        return (
            dict.fromkeys(kind.model_fields, "default")
            | dict.fromkeys(FileSource(kind, self.config)(), self.config or "")
            | {name: variable(name) for name in EnvSettingsSource(kind)()}
            | {name: flag(name) for name in _parsed(kind, arguments)()}
        )

    def environment(self) -> dict[str, str]:
        """These settings as the environment of a child process, which then needs no file."""
        values = self.model_dump(mode="json", exclude_none=True, exclude={"config"})
        return {variable(name): str(value) for name, value in values.items()}


class FileSource(PydanticBaseSettingsSource):
    """The TOML file that `config` names. Keys of other services are left out, unknown keys are refused."""

    def __init__(self, settings_cls: type[BaseSettings], path: str | None = None, named_by: str = "config") -> None:
        """path: the file to read instead of that of `config`. named_by: the flag or variable that names it."""
        super().__init__(settings_cls)
        self._path, self._named_by = path, named_by

    def __call__(self) -> dict[str, Any]:
        path = self._path or self.current_state.get("config")
        if path is None:
            return {}
        try:
            with open(path, "rb") as file:
                found = tomllib.load(file)
        except OSError as error:
            raise SystemExit(f"{self._named_by}: {path} cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise SystemExit(f"{self._named_by}: {path} cannot be read as TOML ({error})") from None
        for name, value in found.items():
            if isinstance(value, dict):
                raise SystemExit(f"{path}: [{name}] is a table; settings stand at the top of the file, in none")
        check_names(found, KNOWN - {"config"}, f"{path}: ")
        return {name: value for name, value in found.items() if name in self.settings_cls.model_fields}

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError("all values come at once, from __call__")


def without_password(url: str) -> str:
    """A URL that may be shown."""
    return PASSWORD.sub("***", LOGIN.sub("***@", url))


def has_password(text: str) -> bool:
    """Whether a text is a URL with a password in it."""
    login = LOGIN.search(text)
    return (login is not None and ":" in login[0]) or PASSWORD.search(text) is not None


def variable(name: str) -> str:
    return PREFIX + name.upper()


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parsed(kind: type[Settings], arguments: Sequence[str]) -> CliSettingsSource[Any]:
    """The flags in a command line's arguments. Raises SystemExit for an unknown flag, and after --help."""
    if arguments and not arguments[0].startswith("-") and "model" in kind.model_fields:
        raise SystemExit(f"{arguments[0]}: every setting has a name; did you mean --model {arguments[0]}?")
    switches = {f"no_{name}" for name, field in kind.model_fields.items() if field.annotation is bool}
    known = {flag(name) for name in {"help", *kind.model_fields, *switches}}
    check_names([word.partition("=")[0] for word in arguments if word.startswith("--")], known)
    for name, word in zip(["", *arguments], arguments, strict=False):
        given = (word if word.startswith("--") else name).partition("=")[0]
        if has_password(word) or given == "--redis-password":
            better = f"{variable(given.lstrip('-').replace('-', '_'))} or the file of --config"
            raise SystemExit(f"{given}: everybody could read the password in the list of processes; use {better}")
    source: CliSettingsSource[Any] = CliSettingsSource(
        kind, formatter_class=HelpFormatter, add_argument_method=partial(_add_argument, kind, {})
    )
    source.root_parser.epilog = EPILOG
    source.root_parser.usage = "%(prog)s [--SETTING VALUE ...]"  # argparse would list all of them
    return source(args=list(arguments))


def _add_argument(kind: type[Settings], groups: dict[str, Any], parser: Any, *flags: str, **options: Any) -> None:
    """argparse's add_argument, below the heading of the class that defines the setting."""
    heading = heading_of(kind, options.get("dest", "config"))  # --help has no dest
    if heading == Settings.heading:  # argparse's own
        groups[heading] = parser
    elif heading not in groups:
        groups[heading] = parser.add_argument_group(heading)
    groups[heading].add_argument(*flags, **options)


def heading_of(kind: type[Settings], name: str) -> str:
    """The heading of a setting in --help: that of the class that defines it."""
    part = next(part for part in (*kind.parts, kind) if name in part.model_fields)
    owner = next(base for base in reversed(part.__mro__) if name in getattr(base, "model_fields", ()))
    return cast(type[Settings], owner).heading


def check_names(names: Iterable[str], known: Iterable[str], where: str = "") -> None:
    """Raises SystemExit for unknown names, with a sentence for each that says which known name is nearest."""
    known = set(known)
    wrong = [f"{where}{name}: there is no such setting{suggestion(name, known)}" for name in names if name not in known]
    if wrong:
        raise SystemExit("\n".join(wrong))


def unknown_variables(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """The variables `ORCA_*` that are no settings: the names that resemble none, and a sentence for each misspelt one.

    Only what follows the prefix is compared. With it ORCA_HOME would resemble ORCA_HOST.
    """
    known = {name.upper() for name in KNOWN}
    strangers: list[str] = []
    misspelt: list[str] = []
    for name in sorted(name.upper() for name in names if name.upper().startswith(PREFIX)):
        rest = name.removeprefix(PREFIX)
        if rest not in known:
            near = suggestion(rest, known, PREFIX)
            if near:
                misspelt.append(f"{name}: there is no such setting{near}")
            else:
                strangers.append(name)
    return strangers, misspelt


def sentence(error: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """An error of pydantic, with the setting's value, and its name as the user gave it."""
    problem = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:  # several settings that do not fit together: the message names them
        return renamed(problem, names)
    name = str(error["loc"][0])
    if error["type"] in WORDS:
        problem = WORDS[error["type"]].format(**error.get("ctx", {}))
    if error["type"] == "missing":
        return f"{flag(name)}: is required; {variable(name)} or the file of --config can give it too"
    return f"{names.get(name, name)}: {problem} (it is {error['input']!r})"


def renamed(sentence: str, names: Mapping[str, str]) -> str:
    """A sentence `NAME: ..`, perhaps after `rank 0: ` or the like, with the first setting's name as the user gave it.

    A child process knows its settings as variables, so it may say ORCA_NAME where its parent was given a flag.
    """
    for found in NAMED.finditer(sentence):
        name = found[1].removeprefix(PREFIX).lower()
        if name in KNOWN:
            return sentence[: found.start()] + names.get(name, found[1]) + sentence[found.end() :]
    return sentence


def _names_given(kind: type[Settings], flags: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, str]:
    """Each setting that was given, as the user wrote it: `--name`, `ORCA_NAME`, or `FILE: name`."""
    variables = EnvSettingsSource(kind)()
    names = {name: variable(name) for name in variables} | {name: flag(name) for name in flags}
    path = flags.get("config") or given.get("config") or variables.get("config")
    in_file = FileSource(kind, path, names.get("config", "config"))() if path is not None else {}
    return {name: f"{path}: {name}" for name in in_file} | names


class ConnectionSettings(Settings):
    """The settings of everything that connects to others."""

    heading = "every service"

    tls_dir: str | None = None
    """Folder with tls.crt, tls.key and ca.crt: connections are mTLS then, plaintext if it is not given."""


class ServiceSettings(ConnectionSettings):
    """The settings of every service."""

    heading = "every service"

    host: str = "127.0.0.1"
    """Address that the service's ports listen on."""
    status_port: int = Field(default=0, ge=0, le=65535)
    """Port of /livez and /readyz; 0 takes a free one."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """Bound of an orderly end, in seconds."""
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"],
        BeforeValidator(lambda level: level.upper() if isinstance(level, str) else level),
    ] = "INFO"
    """The least level that is logged, in upper or lower case."""
    run_dir: str | None = None
    """Folder of the schedulers' journals; none are written if it is not given."""
    trace_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the requests whose spans are exported; those of a caller's sampled trace always are."""
    trace_slow: Annotated[float, Field(ge=0)] = 0.0
    """Seconds from which on a request's own spans are exported in any case, as a failed one's always are; 0: never."""

    def open_log(self, service: str) -> None:
        """Sends this process's log to standard error, and begins it with the warnings about the settings."""
        logs.configure(service, self.log_level)
        for warning in self.warnings:
            log.warning(warning)


class PoolSettings(ConnectionSettings):
    """The settings of the request pool."""

    heading = "request pool"

    redis_url: str = "redis://127.0.0.1:6379/0"
    """The Redis of the request pool."""
    redis_password: str | None = None
    """Its password where redis_url has none, and that of its Sentinels."""
    pool: str = "default"
    """Name of the release: its keys in Redis begin with `orca:{POOL}:`."""
    redis_replicas: int = Field(default=0, ge=0)
    """Replicas on whose disks a token is before a client sees it (WAITAOF): a failover then loses none."""
    allow_volatile_redis: bool = False
    """Start with a Redis that evicts any key or has no append-only file, and only warn."""
    retention: float = Field(default=300.0, gt=0)
    """Seconds for which an ended request can be resumed; all services of a release need the same."""
    retain_requests: int = Field(default=100_000, gt=0)
    """Ended requests that are kept at most, the latest ones."""
    retain_bytes: int = Field(default=1 << 30, gt=0)
    """Their bytes in Redis at most."""
