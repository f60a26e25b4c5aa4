"""A scheduler of a few lines that drives a stage directly, with random batches of both phases."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from orca.v1 import worker_pb2
from orca.v1.sampling_pb2 import SamplingParams
from orca_common.adapters import Adapter
from orca_common.checkpoint import read_checkpoint
from orca_scheduler.core.core import Member
from orca_scheduler.ranks.members import increment, initiation, put_members
from orca_worker.iteration.model import Compute
from orca_worker.partition import Types
from orca_worker.stage.stage import Stage


@dataclass
class Sampled:
    """A request: its prompt, its sampling, and what it has made so far."""

    prompt: list[int]
    new_tokens: int
    sampling: dict[str, Any] = field(default_factory=dict)  # fields of SamplingParams
    made: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[bytes] = field(default_factory=list)  # of each token made, where they are asked for
    scored_prompt: bytes = b""
    stuck: bool = False  # a token of it meant nothing: none could follow by its form

    @property
    def params(self) -> SamplingParams | None:
        return SamplingParams(**self.sampling) if self.sampling else None


def make_stage(
    folder: Path,
    slots: int,
    block_size: int,
    dtype: str = "float32",
    kernels: str = "auto",
    threads: int = 1,
    quantize: str | None = None,
    adapters: Sequence[Adapter] = (),
    adapters_folder: Path | None = None,
    kv_dtype: str | None = None,
) -> Stage:
    root = "" if adapters_folder is None else str(adapters_folder)
    checkpoint = read_checkpoint(folder, quantize, tuple(adapters), root)
    stage = Stage(checkpoint, Types.of(dtype, kv_dtype), torch.device("cpu"), slots, Compute(threads, kernels))
    assert stage.form(block_size).slots == slots // block_size * block_size
    stage.allocate(slots, block_size)
    return stage


def no_guess(request: Sampled) -> Sequence[int]:
    return ()


def drafted(member: Member, drafts: int) -> Member:
    """An increment with this number of drafts behind its token."""
    return member._replace(count=1 + drafts, outputs=1 + drafts)


class TinyEngine:
    """Runs requests on a stage. It gives out rows and blocks in random order, and reuses those of ended requests."""

    def __init__(
        self,
        stage: Stage,
        slots: int,
        block_size: int,
        seed: int = 0,
        guess: Callable[[Sampled], Sequence[int]] = no_guess,
    ) -> None:
        """guess: drafts for the next tokens of a request; those beyond its end are left out."""
        self.stage, self.block_size, self.guess = stage, block_size, guess
        self.chance = random.Random(seed)
        self.free_blocks = list(range(slots // block_size))
        self.free_rows = list(range(100))
        self.chance.shuffle(self.free_blocks)
        self.chance.shuffle(self.free_rows)
        self.number = 0
        self.ended: list[int] = []
        self.rows: dict[int, tuple[int, list[int]]] = {}  # id of a running request: its row and blocks
        self.mixed = 0  # iterations with both phases
        self.late: set[int] = set()  # ids of the requests whose masks were not there in the last iteration

    def admission(self, request: Sampled) -> worker_pb2.Admission:
        """Admits a request. Its input is the prompt and everything it has made."""
        tokens = len(request.prompt) + request.new_tokens
        row = self.free_rows.pop()
        blocks = [self.free_blocks.pop() for _ in range(-(-tokens // self.block_size))]
        self.rows[id(request)] = row, blocks
        return worker_pb2.Admission(
            row=row,
            claim=self.number + 1,
            token_ids=request.prompt + request.made,
            generated=len(request.made),
            sampling=request.params,
        )

    def begins(self, request: Sampled) -> Member:
        row, blocks = self.rows[id(request)]
        return initiation(row, len(request.prompt) + len(request.made), blocks)

    def goes_on(self, request: Sampled, drafts: int) -> Member:
        tokens = [*request.prompt, *request.made]
        return drafted(increment(self.rows[id(request)][0], len(tokens) - 1, tokens[-1]), drafts)

    def drafts(self, request: Sampled) -> Sequence[int]:
        return self.guess(request)[: request.new_tokens - len(request.made) - 1]

    def free(self, request: Sampled) -> None:
        """Gives a request's row and blocks back."""
        row, blocks = self.rows.pop(id(request))
        self.free_rows.insert(0, row)
        self.free_blocks += blocks
        self.chance.shuffle(self.free_blocks)
        self.ended.append(row)

    def step(self, initiations: Sequence[Sampled], increments: Sequence[Sampled]) -> None:
        """One iteration of this batch."""
        self.number += 1
        ended, self.ended = self.ended, []
        iteration = worker_pb2.Iteration(
            number=self.number,
            free_rows=ended,
            admissions=[self.admission(request) for request in initiations],
        )
        drafts = list(map(self.drafts, increments))
        parts = [*map(self.begins, initiations), *map(self.goes_on, increments, map(len, drafts))]
        put_members(iteration, parts, [*chain(*drafts)])
        self.mixed += bool(initiations) and bool(increments)
        output = self.stage.run(iteration)
        members = [*initiations, *increments]
        owners = [
            one for one, made in zip(members, output.made or [1] * len(members), strict=True) for _ in range(made)
        ]
        self.late = {id(owners[n]) for n in output.waiting}
        for request, token, logprob in zip(owners, output.token_ids, output.logprobs, strict=True):
            if id(request) in self.late:
                assert token == [*request.prompt, *request.made][-1]
                continue
            request.made.append(token)
            assert math.isnan(logprob) != bool(request.sampling.get("logprobs"))
            request.logprobs.append(logprob)
        for n in output.stuck:
            owners[n].stuck = True
        for n, scores in output.tops.items():
            owners[n].tops.append(scores)
        for n, scores in output.prompts.items():
            members[n].scored_prompt += scores

    def run(self, requests: Sequence[Sampled], max_batch: int = 6) -> None:
        """Runs requests to their ends, in random batches."""
        waiting, running = list(requests), []
        while waiting or running:
            batch = self.chance.sample(running, k=self.chance.randint(0, min(len(running), max_batch - 1)))
            room = max_batch - len(batch)
            new = waiting[: self.chance.randint(not batch, min(2, room))]
            waiting = waiting[len(new) :]
            if not new and not batch:
                batch = running[:max_batch]
            self.step(new, batch)
            running += new
            for request in [r for r in running if len(r.made) == r.new_tokens]:
                running.remove(request)
                self.free(request)
