"""Settings of `orca serve`: how many of each service one machine runs, and the settings of these services."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, create_model, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from orca_common.settings import Settings
from orca_endpoint.settings import EndpointSettings
from orca_scheduler.settings import SchedulerSettings, check_roles, check_slots
from orca_ui.settings import UiSettings
from orca_worker.settings import Kernels, SupervisorSettings

# The settings of each process.
SERVICES = {
    "endpoint": EndpointSettings,
    "supervisor": SupervisorSettings,
    "scheduler": SchedulerSettings,
    "ui": UiSettings,
}
# The stack decides these for each process.
DECIDED = {"advertise_host", "first_gpu", "gpus_per_pod", "ports_kept", "rank_port", "ranks", "status_port"}
DECIDED |= {"workers", "worker_statefulset", "worker_namespace", "worker_port"}  # it knows where they are
# It has a fixed number of engines.
DECIDED |= {"max_engines", "min_engines", "scale_queue_seconds", "scale_up_seconds", "scale_down_seconds"}
DECIDED |= {"scheduler_status", "endpoint_url"}


class StackSettings(Settings):
    """Starts everything on this machine, as the processes that a cluster runs, until Ctrl-C."""

    model_config = SettingsConfigDict(cli_prog_name="orca serve")
    heading = "stack"

    model: str | None = None
    """Checkpoint folder, hub name, or gpt3-13b and the like for random weights; the demo model if not given."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights, and of keys and values; auto: the fastest on this machine."""
    kv_dtype: Literal["int8"] | None = None
    """Type of keys and values, on a CPU: codes of eight bits, a scale for each token and head; dtype if not given."""
    quantize: Literal["int8", "int4"] | None = None
    """Format that a layer's matrices get when they are loaded; they stay in dtype if not given."""
    adapters: str = ""
    """LoRA adapters of PEFT beside the model, as `NAME=FOLDER` separated by commas; a request's model is one's name."""
    adapters_folder: str = ""
    """Folder below which further adapters may be loaded while engines run; empty: none may."""
    adapters_file: str = ""
    """File with further such adapters, one a line; it is read again when it has changed. Empty: no file."""
    operators: str = ""
    """Tenants who may load and unload adapters over HTTP, separated by commas; `*`: all callers; empty: no caller."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU when there is one."""
    kernels: Kernels = "auto"
    """Kernels on a CPU, by instruction set; auto: the best; torch: none; device-loop: the loop of a GPU, for tests."""
    tp: int = Field(default=1, ge=1)
    """Tensor ranks: how many share each layer of a stage."""
    pp: int = Field(default=1, ge=1)
    """Pipeline stages: how many share the layers of the model."""
    run_ahead: int | None = Field(default=None, ge=0, le=1)
    """1: a batch's next iteration is issued before its tokens are back; 1 on a GPU and 0 on a CPU if not given."""
    max_batch_size: int | None = Field(default=None, gt=0)
    """Requests in a batch; if not given 32, or 8 on a CPU that has no instruction for products of bfloat16."""
    engines: int = Field(default=1, ge=1)
    """Copies of the model, each of tp x pp ranks."""
    roles: str = "mixed"
    """prefill=N,decode=M: the first N engines compute prompts, M others go on; mixed: each engine does both."""
    schedulers: int = Field(default=1, ge=1)
    """Scheduler processes; each engine is driven by one of them."""
    endpoints: int = Field(default=1, ge=1)
    """Endpoint processes. The first has port and http_port, the others free ones."""
    host: str = "127.0.0.1"
    """Address of the endpoints' doors; the other processes stay on loopback."""
    port: int = Field(default=50051, ge=0, le=65535)
    """Port of gRPC; 0 takes a free one."""
    http_port: int = Field(default=8000, ge=0, le=65535)
    """Port of the OpenAI API; 0 takes a free one."""
    ui: bool = True
    """Serve the live page, too."""
    ui_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the live page, 0: a free one; 8001, or a free one where that is taken, if not given."""
    redis_url: str | None = None
    """A Redis of yours for the request pool; an embedded server if not given."""
    redis_password: str | None = None
    """Its password where redis_url has none, and that of its Sentinels."""
    allow_volatile_redis: bool = False
    """Use a Redis of yours that evicts any key or has no append-only file, and only warn."""
    served_model_name: str | None = None
    """The model's name at the doors; the hub's name or that of its folder if not given."""
    run_dir: str | None = None
    """Folder of logs, journals, processes.json and the pool; if not given, a new one of the last ten."""
    tls_dir: str | None = None
    """Folder of `orca certs`: all processes speak mTLS, each with its role's certificate; plaintext if not given."""
    api_keys: str | None = None
    """Keys that may call, as `TENANT sha256:HASH` separated by commas; without keys everybody may. See `orca key`."""
    api_keys_file: str | None = None
    """File with such keys, one a line; it is read again when it has changed."""
    threads: int | None = Field(default=None, ge=0)
    """Threads of a rank's operations on a CPU, 0: one for each core; its share of the cores if not given."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """Bound of the orderly end, in seconds; what has not ended 10 s later is killed."""
    start_timeout: float = Field(default=600.0, gt=0)
    """Bound of the start, in seconds, without the download of a model; then it is given up."""

    @model_validator(mode="before")
    @classmethod
    def _engines_of_roles(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Where their number is not given, there are as many engines as have a role."""
        if "engines" in values:
            return values
        with suppress(ValueError):  # which the validator below tells
            if engines := check_roles(str(values.get("roles", "")), 0):
                return values | {"engines": engines}
        return values

    @model_validator(mode="after")
    def _roles_have_engines(self) -> Self:
        engines = check_roles(self.roles, self.run_ahead or 0)
        if engines not in (0, self.engines):
            raise ValueError(f"roles: {self.roles} are {engines} engines, and engines is {self.engines}")
        return self


class StateSettings(BaseSettings):
    """Where a user's programs leave what is theirs, by the XDG base directories."""

    xdg_state_home: Path | None = None

    @property
    def runs(self) -> Path:
        """The folder of the runs that are given none."""
        try:
            state = self.xdg_state_home or Path.home() / ".local/state"
        except RuntimeError:  # a container whose user has no home
            return Path(tempfile.gettempdir()) / f"orca-{os.getuid()}/runs"
        return state / "orca/runs"


def _of_services() -> dict[str, Any]:
    """The services' settings that the stack neither has itself nor decides."""
    fields = {name: field for service in SERVICES.values() for name, field in service.model_fields.items()}
    return {
        name: (field.annotation, field)
        for name, field in fields.items()
        if name not in DECIDED and name not in StackSettings.model_fields
    }


def _check_slots(settings: Any) -> Any:
    check_slots(settings.slots, settings.block_size)
    return settings


VALIDATORS: dict[str, Any] = {"slots_hold_a_block": model_validator(mode="after")(_check_slots)}

StackSettings.parts = (StackSettings, *SERVICES.values())

# What `orca serve` loads. The stack knows it as StackSettings, and only hands the services' settings on.
ServeSettings = create_model(
    "ServeSettings",
    __base__=StackSettings,
    __doc__=StackSettings.__doc__,
    __validators__=VALIDATORS,
    **_of_services(),
)
