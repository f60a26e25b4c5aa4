"""The logits that stages sample from, whatever computes them, and those of transformers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import prefix_mask
from torch import Tensor
from transformers import AutoModelForCausalLM
from worker.driver import Sampled, TinyEngine

from orca_kernels.triton.draws import Draws
from orca_worker.data_plane.plane import DataPlane
from orca_worker.device.model import DeviceModel, Made
from orca_worker.iteration.batch import Batch
from orca_worker.iteration.model import Output
from orca_worker.models import cpu
from orca_worker.sampling import sampling
from orca_worker.stage.stage import Stage


@contextmanager
def seen_logits() -> Iterator[list[Tensor]]:
    """The logits of each iteration, [B, V] in the batch's order."""
    seen: list[Tensor] = []

    def watched(sample: Any) -> Any:
        def look(*given: Any) -> Any:
            seen.append(next(one for one in given if isinstance(one, Tensor)).clone())
            return sample(*given)

        return look

    on_device = DeviceModel._sampled

    def look_at_device(model: DeviceModel, batch: Batch, plane: DataPlane, made: Made, draws: Draws) -> Output:
        if made.logits is not None:  # a replay runs no Python that could be watched
            seen.append(made.logits.clone())
        return on_device(model, batch, plane, made, draws)

    with pytest.MonkeyPatch.context() as patch:
        for module in (cpu, sampling):
            patch.setattr(module, "sample", watched(module.sample))
        patch.setattr(DeviceModel, "_sampled", look_at_device)
        yield seen


def seen_by(stage: Stage, requests: Sequence[Sampled], seed: int = 1) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Runs requests in random batches of both phases. The tokens before each token that is made, and its logits [V].

    Requests of the same lengths have the same batches with the same seed. Each must ask for logprobs: for the likeliest
    token alone the kernels of a CPU write no logits.
    """
    found: list[tuple[tuple[int, ...], Tensor]] = []

    class Engine(TinyEngine):
        def step(self, initiations: Sequence[Sampled], increments: Sequence[Sampled]) -> None:
            before = [(*one.prompt, *one.made) for one in (*initiations, *increments)]
            seen.clear()
            super().step(initiations, increments)
            [logits] = seen
            found.extend(zip(before, logits.cpu()[: len(before)], strict=True))

    with seen_logits() as seen:
        Engine(stage, 400, 16, seed).run(requests)
    yield from found


def prompt_of(tokens: Sequence[int], requests: Sequence[Sampled]) -> int:
    """How many of the tokens that stand before one that was made are the prompt of its request."""
    [prompt] = {len(one.prompt) for one in requests if list(tokens[: len(one.prompt)]) == one.prompt}
    return prompt


class InTransformers:
    """A checkpoint in transformers, its weights rounded to a type. (Rotary tables and some norms stay float32.)"""

    def __init__(self, folder: Path, dtype: torch.dtype, weights: torch.dtype | None = None) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.copy_(parameter.to(weights or dtype))

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], prompt: int | None = None) -> Tensor:
        """[V] float64, after all tokens. prompt: how many of them see each other, in a prefix LM."""
        mask = None if prompt is None else prefix_mask(len(tokens), prompt, self._model.dtype)
        return self._model(torch.tensor([list(tokens)]), attention_mask=mask, use_cache=False).logits[0, -1].double()
