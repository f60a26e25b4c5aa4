"""Settings of the scheduler."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from orca_common.settings import PoolSettings, ServiceSettings

from .places import Shape

Positive = Annotated[int, Field(gt=0)]


class SchedulerSettings(ServiceSettings, PoolSettings):
    """`ORCA_WORKERS` lists the pods of all engines in the order of their ordinals, as their supervisors' addresses."""

    workers: str  # "host:port,host:port,.."
    tp: Positive = 1
    pp: Positive = 1
    gpus_per_pod: Positive | None = None  # ranks of a pod, all of one stage; None: tp
    max_batch_size: Positive = 8  # max_bs of Algorithm 1
    block_size: Positive = 16  # slots in a block
    slots: Positive | None = None  # per engine; None: as many as the smallest rank's memory holds
    run_ahead: Annotated[int, Field(ge=0, le=1)] = 0  # 1: a batch's next iteration is issued before its tokens are back

    @model_validator(mode="after")
    def _pods_hold_whole_shares(self) -> Self:
        if self.tp % self.ranks_per_pod:
            raise ValueError(f"gpus_per_pod: {self.gpus_per_pod} is no divisor of tp, {self.tp}")
        return self

    @property
    def ranks_per_pod(self) -> int:
        return self.gpus_per_pod or self.tp

    @property
    def shape(self) -> Shape:
        """How an engine is to be formed."""
        return Shape(self.tp, self.pp, self.ranks_per_pod, self.block_size, self.slots, self.run_ahead)
