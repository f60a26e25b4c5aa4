"""Settings of a worker: of a rank, and of the supervisor of a pod's ranks."""

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from orca_common.settings import ServiceSettings

Kernels = Literal["auto", "amx", "avx512_bf16", "avx512", "avx2", "portable", "torch", "device-loop"]


class WorkerSettings(ServiceSettings):
    """Settings that a rank and its supervisor share."""

    heading = "workers"

    model: str
    """Checkpoint folder, hub name, or gpt3-13b and the like for random weights."""
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
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU when there is one."""
    first_gpu: int = Field(default=0, ge=0)
    """GPU of the pod's first rank, on a machine where pods see each other's GPUs."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of gRPC; 0 takes a free one."""
    advertise_host: str | None = None
    """Address under which others reach this pod; host if not given."""
    slots: int | None = Field(default=None, ge=1)
    """Tokens whose keys and values a rank holds at most; what its memory holds if not given."""
    threads: int = Field(default=0, ge=0)
    """Threads of a rank on a CPU; 0: one for each core that the process may use."""
    kernels: Kernels = "auto"
    """Kernels on a CPU, by instruction set; auto: the best; torch: none; device-loop: the loop of a GPU, for tests."""
    cuda_graphs: bool = True
    """On a GPU: iterations of increments alone run as CUDA graphs, where a rank is a whole stage."""
    cuda_graphs_tp: bool = False
    """The same where tensor ranks share a stage, with NCCL's operations in the graphs. Never seen on a GPU."""

    @property
    def reachable_host(self) -> str:
        return self.advertise_host or self.host


class RankSettings(WorkerSettings):
    """One rank: a process with one GPU."""

    local_rank: int = Field(default=0, ge=0)
    """The rank's number in its pod. Its GPU is that far behind first_gpu."""


class SupervisorSettings(WorkerSettings):
    """Runs one worker pod: a supervisor, and below it a process for each rank."""

    model_config = SettingsConfigDict(cli_prog_name="orca worker")

    ranks: int = Field(default=1, ge=1)
    """Ranks of the pod."""
    rank_port: int = Field(default=0, ge=0, le=65535)
    """Port of the first rank, the others follow; 0 takes free ones."""
