"""The loop of a GPU on a CPU, with the launch functions in plain torch: `kernels=device-loop`, for tests.

Static inputs, padded buckets, the token table and tokens that come later are those of a GPU (`device/model.py`). So
whole stacks can run them, and be killed, where there is no GPU.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from orca_kernels.reference import SplitAttention
from orca_kernels.triton.draws import Draws
from orca_kernels.triton.plan import Plan

from ..device.model import DeviceModel
from ..device.replay import Replayed
from ..iteration.kv import KVManager
from ..iteration.model import Compute
from ..sampling.host_draw import draw_rows
from ..sampling.sampling import uniform
from ..sampling.scoring import log_totals
from .cuda import FusedStage, wants_graphs
from .plain import LoadedAttention, PlainKernels, TokenKernels, TorchStage


def on_cpu(stage: TorchStage, recorder: Replayed, compute: Compute) -> DeviceModel:
    """The `Model` of a stage."""
    fused, place = FusedStage(stage, lambda plan, kv: PlanKernels(plan, kv, recorder)), stage.recording.place
    graphs = wants_graphs(place, compute)
    return DeviceModel(fused, place, recorder if graphs else None, partial(recorder.launch, sample))


class PlanKernels(TokenKernels):
    """`Kernels` in plain torch for a plan."""

    def __init__(self, plan: Plan, kv: KVManager, recorder: Replayed) -> None:
        self._plan, self._kv, self._recorder = plan, kv, recorder

    def attend(self, qkv: Tensor, a: LoadedAttention) -> Tensor:
        return self._recorder.launch(attend, qkv, self._plan, self._kv, a)


def attend(qkv: Tensor, plan: Plan, kv: KVManager, a: LoadedAttention) -> Tensor:
    """Does the work of `write_kv` and `split_attention`. Tokens that pad the plan stand behind others; their rows of
    the result are zeros."""
    real = int((plan.slots >= 0).sum())
    out = qkv.new_zeros(len(qkv), a.of.heads * a.of.head_size)
    if not real:
        return out
    tiles = plan.tiles[plan.tiles[:, 2] > 0].tolist()
    of = {request: (shift, least) for request, _, _, shift, least in tiles}
    rows = {request: sum(rows for other, _, rows, *_ in tiles if other == request) for request in sorted(of)}
    group = sum(rows.values()) // real
    lengths = [n // group for n in rows.values()]
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    contexts = [of[request][0] + start for request, start in zip(rows, starts, strict=True)]
    split = SplitAttention(
        plan.table.long(),
        lengths,
        contexts,
        plan.slots[:real].long(),
        heads=kv.heads,
        block_size=kv.block_size,
        prompts=[of[request][1] for request in rows],
    )
    out[:real] = PlainKernels(split, kv, plan.positions[:real].long()).attend(qkv[:real], a)
    return out


def sample(logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Does the work of `orca_kernels.triton.sampling.sample`, by the draw of the host."""
    largest, tokens = logits.max(-1)
    temperatures, top_k, top_p, min_p, seeds, indexes = (each.numpy() for each in draws)
    drawn = np.flatnonzero(temperatures > 0)
    if len(drawn):
        u = uniform(seeds[drawn].view(np.uint64), indexes[drawn])
        rows, settings = logits[drawn].float().numpy(), [each[drawn] for each in (temperatures, top_k, top_p, min_p)]
        of_drawn = draw_rows(rows, rows.shape[1], settings, u)
        tokens[drawn] = torch.tensor(of_drawn)
    values = logits.float()
    logprobs = values.gather(1, tokens[:, None])[:, 0] - log_totals(values)
    return tokens, logprobs.masked_fill(~largest.isfinite(), torch.nan)
