"""Settings of a worker: of a rank, and of the supervisor of a pod's ranks."""

from typing import Literal

from pydantic import Field

from orca_common.settings import ServiceSettings


class WorkerSettings(ServiceSettings):
    """Settings that a rank and its supervisor share."""

    model: str  # a checkpoint folder, or a name on the hub
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPU when there is one
    first_gpu: int = Field(default=0, ge=0)  # GPU of the pod's first rank, where pods see each other's GPUs
    port: int = Field(default=0, ge=0, le=65535)  # gRPC; 0 takes a free one
    advertise_host: str | None = None  # where others reach this pod; `host` if not given
    slots: int | None = Field(default=None, ge=1)  # at most so many; as many as the memory holds if not given
    threads: int = Field(default=0, ge=0)  # for torch's operations on a CPU; 0: torch chooses

    @property
    def reachable_host(self) -> str:
        return self.advertise_host or self.host


class RankSettings(WorkerSettings):
    """One rank: a process with one GPU."""

    local_rank: int = Field(default=0, ge=0)  # its number in the pod; its GPU is `first_gpu` plus this number
    supervisor_pid: int = 0  # the parent, which says which rank this is, and with which it ends; 0: none


class SupervisorSettings(WorkerSettings):
    """The supervisor, process 1 of a pod. `port` is its own."""

    ranks: int = Field(default=1, ge=1)
    rank_port: int = Field(default=0, ge=0, le=65535)  # of the first rank, the others follow; 0 takes free ones
    spare: bool = True  # keep an idle process for the next rank that dies: saves 1 to 2 s, costs some 300 MB
