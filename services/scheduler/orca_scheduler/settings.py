"""Settings of the scheduler."""

from collections.abc import Collection
from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from orca_common.settings import PoolSettings, ServiceSettings

from . import timers
from .core.core import Core
from .core.policy import Policy, limits_of
from .core.roles import Role, Roles
from .core.sets import AUTO, fitting, policy_named
from .lifecycle.places import Shape
from .scaling import Bounds

Positive = Annotated[int, Field(gt=0)]


def check_slots(slots: int | None, block_size: int) -> None:
    """Raises ValueError when there is not even one block."""
    if slots is not None and slots < block_size:
        raise ValueError(f"slots: {slots} are less than a block, which has {block_size} (block_size)")


def check_roles(roles: str, run_ahead: int) -> int:
    """The number of engines that the roles are for; 0: any number. Raises ValueError for roles that cannot be."""
    engines = Roles.parse(roles).engines
    if engines and run_ahead:
        raise ValueError(f"roles: {roles} needs run_ahead=0: a request changes engines with all its tokens known")
    return engines


class SchedulerSettings(ServiceSettings, PoolSettings):
    """Runs one scheduler: it claims requests, selects batches, and drives the engines."""

    model_config = SettingsConfigDict(cli_prog_name="orca scheduler")
    heading = "schedulers"

    workers: str | None = None
    """Addresses of the pods' supervisors, "host:port,host:port,..", of all engines in the order of their ordinals."""
    worker_statefulset: str | None = None
    """Instead of workers: the name of the StatefulSet whose pods they are. Kubernetes is asked for their addresses."""
    worker_namespace: str | None = None
    """Namespace of the StatefulSet; the scheduler's own if not given."""
    worker_port: Annotated[int, Field(gt=0, le=65535)] = 50050
    """Port of the supervisors in pods that Kubernetes has told."""
    tp: Positive = 1
    """Tensor ranks: how many share each layer of a stage."""
    pp: Positive = 1
    """Pipeline stages: how many share the layers of the model."""
    gpus_per_pod: Positive | None = None
    """Ranks of a pod, all of one stage; tp if not given."""
    max_batch_size: Positive = 32
    """Requests in a batch, max_bs of the paper's Algorithm 1: more throughput, longer iterations."""
    block_size: Positive = 16
    """Slots in a block."""
    slots: Positive | None = None
    """Tokens whose keys and values an engine holds, rounded down to whole blocks; what memory holds if not given."""
    policy: str = AUTO
    """Choice of batches: auto, paper (Algorithm 1), even, stall-free, split-fuse, balanced, and parts that differ."""
    run_ahead: Annotated[int, Field(ge=0, le=1)] = 0
    """1: a batch's next iteration is issued before its tokens are back, and an end is found one iteration late."""

    roles: str = "mixed"
    """prefill=N,decode=M: the first N engines compute prompts, M others go on; mixed: each engine does both."""

    finish_seconds: Annotated[float, Field(ge=0)] = timers.FINISH
    """Seconds for which an engine may finish what it began, before its pods are replaced by those of another model."""

    max_engines: Positive | None = None
    """Engines that schedulers give worker_statefulset at most, by the load; they do not scale it if not given."""
    min_engines: Positive = 1
    """Engines that they give it at least."""
    scale_queue_seconds: Annotated[float, Field(gt=0)] = timers.QUEUE_OLD
    """Seconds that the first request of the queue has waited when another engine is asked for."""
    scale_up_seconds: Annotated[float, Field(ge=0)] = timers.UP_AGAIN
    """Seconds after a change of the number of engines until more are asked for."""
    scale_down_seconds: Annotated[float, Field(ge=0)] = timers.DOWN
    """Seconds for which all requests must have fitted into one engine less, before it is taken away."""

    show_prompts: bool = False
    """The live page may show prompts and answers; their token ids are then on the schedulers' status ports."""
    ports_kept: bool = False
    """The parent process keeps the status port by SO_REUSEPORT, so that no other program takes it during a restart."""

    @model_validator(mode="after")
    def _one_discovery(self) -> Self:
        if (self.workers is None) == (self.worker_statefulset is None):
            raise ValueError("workers: exactly one of workers and worker_statefulset must say where the workers are")
        return self

    @model_validator(mode="after")
    def _pods_hold_whole_shares(self) -> Self:
        if self.tp % self.ranks_per_pod:
            raise ValueError(f"gpus_per_pod: {self.gpus_per_pod} is no divisor of tp, {self.tp}")
        return self

    @model_validator(mode="after")
    def _slots_hold_a_block(self) -> Self:
        check_slots(self.slots, self.block_size)
        return self

    @model_validator(mode="after")
    def _bounds_of_engines_fit(self) -> Self:
        if self.max_engines is None:
            return self
        if self.worker_statefulset is None:
            raise ValueError("max_engines: engines are scaled in Kubernetes alone (worker_statefulset)")
        if self.max_engines < self.min_engines:
            raise ValueError(f"max_engines: {self.max_engines} are less than the {self.min_engines} of min_engines")
        return self

    @model_validator(mode="after")
    def _policy_can_be(self) -> Self:
        policy = self.policy_for(())
        limits_of(policy, self.max_batch_size, self.pp)
        if policy.drafts != "off" and self.run_ahead:
            raise ValueError(
                f"policy: drafts={policy.drafts} needs run_ahead=0: an iteration that is issued before the last token "
                "is back knows no draft for what follows it"
            )
        return self

    @model_validator(mode="after")
    def _roles_can_be(self) -> Self:
        if check_roles(self.roles, self.run_ahead) and self.max_engines is not None:
            raise ValueError(f"roles: {self.roles} is a fixed number of engines, and max_engines scales them")
        return self

    @property
    def ranks_per_pod(self) -> int:
        return self.gpus_per_pod or self.tp

    def policy_for(self, can: Collection[str]) -> Policy:
        """The policy of engines whose model can do this. Raises ValueError for one that there is not."""
        if self.policy == AUTO:
            return fitting(can, self.max_batch_size, self.run_ahead)
        return policy_named(self.policy)

    def core(self, role: Role | None = Role.MIXED) -> Core:
        """The core of an engine under these settings, whose model is not known yet. role: None: of one that will not
        form."""
        policy = self.policy_for(())
        return Core(self.max_batch_size, self.pp, self.block_size, self.run_ahead, policy, role or Role.MIXED)

    @property
    def bounds(self) -> Bounds | None:
        """The bounds of scaling; None: engines are not scaled."""
        if self.max_engines is None:
            return None
        return Bounds(
            least=self.min_engines,
            most=self.max_engines,
            queue_age=self.scale_queue_seconds,
            up_seconds=self.scale_up_seconds,
            down_seconds=self.scale_down_seconds,
            finish_seconds=self.finish_seconds,
        )

    @property
    def shape(self) -> Shape:
        """The shape in which an engine is formed."""
        return self.shape_of(Role.MIXED)

    def shape_of(self, role: Role | None) -> Shape:
        """The shape in which an engine of this role is formed."""
        sizes = self.tp, self.pp, self.ranks_per_pod, self.block_size, self.slots, self.run_ahead
        return Shape(*sizes, hands_over=role is Role.PREFILL)
