"""Everything that was gathered about an installation. The checks judge nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from .objects import Object, Release

T = TypeVar("T")


@dataclass(frozen=True)
class Unknown:
    """Stands for what could not be gathered."""

    why: str


Asked = T | Unknown  # what was asked for, or why there is no answer
NOT_ASKED = Unknown("no cluster was asked")


@dataclass(frozen=True, order=True)
class Right:
    """Something that a rule of RBAC allows."""

    verb: str
    group: str  # "" is the core group
    resource: str  # as in pods/status

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}{'.' if self.group else ''}{self.group}"


@dataclass(frozen=True)
class Attempt:
    """A try to reach a target from inside a pod."""

    arrow: str  # as in docs/design.md: "scheduler -> worker"
    source: str  # the pod
    target: str  # host:port, or a name to resolve
    answer: str  # "open", "resolved", "refused", "silent", or the error's text
    seconds: float = 0.0


@dataclass(frozen=True)
class Inside:
    """The findings of a program of ours inside a pod."""

    pod: str
    component: str
    ahead: float  # seconds that the pod's clock is ahead of ours
    error: float  # how wrong `ahead` may be
    attempts: tuple[Attempt, ...]
    unready: str = ""  # why the service in it says that it is not ready
    weights: str = ""  # of a worker: how the files have its weights, as in `GPTQ, 4 bits, groups of 128`


@dataclass(frozen=True)
class Redis:
    """The pool's Redis. A setting is "" where it may not be read."""

    asked_from: str  # a pod's name, or "here"
    server: str  # redis or valkey
    version: str
    role: str
    replicas: int  # that follow it now
    appendonly: str
    appendfsync: str
    last_append: str  # ok or err: how the last write to the file went
    maxmemory: int  # bytes; 0: no bound
    policy: str  # what is done at that bound
    used: int  # bytes
    loading: bool
    seconds: float  # for one command, the median
    ahead: float  # seconds that its clock is ahead of that of the asking process


@dataclass(frozen=True)
class Snapshot:
    """An installation, as it was when it was looked at."""

    release: Release
    allowed: Asked[Mapping[Right, bool]] = NOT_ASKED  # what the scheduler's ServiceAccount needs, and whether it may
    pods: Asked[tuple[Object, ...]] = NOT_ASKED  # of the release
    inside: Asked[tuple[Inside, ...]] = NOT_ASKED
    unseen: Mapping[str, str] = field(default_factory=dict)  # pod -> why nothing could be run in it
    redis: Asked[Redis] = NOT_ASKED
