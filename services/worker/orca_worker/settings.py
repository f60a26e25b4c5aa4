"""Settings of a worker: of one rank, and of the supervisor of a pod's ranks."""

from typing import Literal

from pydantic import Field

from orca_common.settings import ServiceSettings


class WorkerSettings(ServiceSettings):
    """What a rank and its supervisor share."""

    model: str  # a checkpoint folder, or a name on the hub
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPU when there is one
    first_gpu: int = Field(default=0, ge=0)  # of the pod's first rank, on a machine where pods see each other's GPUs
    port: int = Field(default=0, ge=0, le=65535)  # gRPC; 0 takes a free one
    advertise_host: str | None = None  # under which others reach this pod; `host` when not given
    slots: int | None = Field(default=None, ge=1)  # at most so many; not given: what the memory holds
    threads: int = Field(default=0, ge=0)  # of torch's operations on a CPU; 0 is torch's own choice

    @property
    def reachable_host(self) -> str:
        return self.advertise_host or self.host


class RankSettings(WorkerSettings):
    """One rank: a process with one GPU."""

    local_rank: int = Field(default=0, ge=0)  # its number in the pod; its GPU is that far behind `first_gpu`
    supervisor_pid: int = 0  # this parent tells it its place, and it ends when the parent does; 0: it has none


class SupervisorSettings(WorkerSettings):
    """Process 1 of a pod. `port` is its own."""

    ranks: int = Field(default=1, ge=1)
    rank_port: int = Field(default=0, ge=0, le=65535)  # of the first rank, the next ones follow; 0 takes free ones
    spare: bool = True  # keep an idle process for the rank that dies next: 1 to 2 s less of a gap, for some 300 MB
