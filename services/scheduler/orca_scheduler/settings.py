"""Settings of the scheduler."""

from typing import Annotated

from pydantic import Field

from orca_common.settings import PoolSettings, ServiceSettings

Positive = Annotated[int, Field(gt=0)]


class SchedulerSettings(ServiceSettings, PoolSettings):
    """`ORCA_WORKERS` lists the pods of all engines in the order of their ordinals, as their supervisors' addresses."""

    workers: str  # "host:port,host:port,.."
    tp: Positive = 1
    pp: Positive = 1
    max_batch_size: Positive = 8  # max_bs of Algorithm 1
    block_size: Positive = 16  # slots in a block
    slots: Positive | None = None  # per engine; None: as many as the smallest rank's memory holds
