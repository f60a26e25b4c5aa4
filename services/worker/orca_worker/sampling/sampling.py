"""From logits to tokens: greedy, temperature, top-k, top-p, min-p, with a draw that depends only on (seed, index).

The generator is counter-based: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11). Its
key is the request's seed, its counter the index of the output token. So a draw is the same whatever else is in the
batch, and the same after a recovery.

The token is found by inverting the cumulative distribution, summed in the vocabulary's order. Logits that differ in the
last bit (from another batch shape) then hardly ever change the token. In sorted order, near ties would. Where they do
change it, the draw lies within 1e-5 of the border of two tokens, or a sum of probabilities within 1e-5 of top-p:
`borders.py` in the tests checks that in float64. Sums of probabilities are float64: with float32, top-p alone would
move borders by 1e-5.

Logits from which no distribution follows give no token: NaN or infinity among them, or nothing but minus infinity. All
three show in the largest logit, which is computed anyway. Minus infinity elsewhere is a token that cannot be chosen.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from orca_kernels.transfer import to_device

from ..data_plane.plane import DataPlane
from ..iteration.batch import Batch
from ..iteration.device_tokens import DeviceTokens
from ..iteration.kv import KVManager, KVShape
from ..iteration.model import Adaptable, Output, ReadAdapter
from ..iteration.rows import Adjusted
from .adjusting import adjust, adjusted_rows, stuck, waiting
from .host_draw import draw_rows
from .scoring import PromptScores, log_totals, tops

PLAIN: Mapping[int, Adjusted] = {}  # of a batch of plain requests

LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
BUMPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


def philox(counter: Sequence[np.ndarray], key: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Philox4x32-10: four counter words and two key words, each [B] uint64 of 32 bits -> four random words [B]."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> HALF) ^ c1 ^ k0, p1 & LOW, (p0 >> HALF) ^ c3 ^ k1, p0 & LOW
        k0, k1 = k0 + BUMPS[0] & LOW, k1 + BUMPS[1] & LOW
    return [c0, c1, c2, c3]


def uniform(seeds: np.ndarray, indexes: np.ndarray) -> np.ndarray:
    """seeds, indexes [B] -> [B] float64 in [0, 1), 53 bits each."""
    seeds, indexes = seeds.astype(np.uint64), indexes.astype(np.uint64)
    zero = np.zeros_like(indexes)
    high, low, _, _ = philox((indexes & LOW, indexes >> HALF, zero, zero), (seeds & LOW, seeds >> HALF))
    return ((high >> np.uint64(5)) * 2.0**26 + (low >> np.uint64(6))) * 2.0**-53


def sample(logits: Tensor, requests: np.ndarray, draws: np.ndarray, adjusted: Mapping[int, Adjusted] = PLAIN) -> Output:
    """logits [O, V], requests [O] of rows.ROW, draws [O] -> a token each, where the logits are finite.

    Waits for the device once, at its end. adjusted: what some of these rows ask for beyond the plain draw; only
    then there is more to wait for.
    """
    largest, tokens = likeliest(logits)
    ends, drawn = draws + requests["prompt"], requests["temperature"] > 0
    if logits.device.type == "cpu":
        drawn[[n for n, one in adjusted.items() if one.changes_logits]] = True
        which = np.flatnonzero(drawn)
        if len(which):
            rows, own = adjusted_rows(logits, which.tolist(), adjusted, ends), requests[which]
            settings = [own[name] for name in ("temperature", "top_k", "top_p", "min_p")]
            found = draw_rows(rows, logits.shape[1], settings, uniform(own["seed"], draws[which]))
            tokens[torch.from_numpy(which)] = torch.tensor(found)
    else:
        judged, which = adjust(logits, adjusted, ends) if adjusted else logits, np.flatnonzero(drawn)
        if judged is not logits:
            _, tokens = likeliest(judged)
        if len(which):
            at = to_device(torch.from_numpy(which), logits.device)
            tokens[at] = draw_at_once(judged[at], requests[which], draws[which])
    logprobs, asking = torch.full_like(largest, math.nan, dtype=torch.float64), np.flatnonzero(requests["logprobs"])
    if len(asking):
        at = to_device(torch.from_numpy(asking), logits.device)
        values = (logits if len(asking) == len(logits) else logits[at]).float()
        logprobs[at] = (values.gather(1, tokens[at][:, None])[:, 0] - log_totals(values)).double()
    table = torch.stack([tokens.double(), logprobs, largest.double()])  # tokens are exact to 2**53
    ids, scores, maxima = table.tolist()  # one copy
    made = Output([int(token) for token in ids], scores, not_finite=not_finite(maxima))
    if not adjusted:
        return made
    return made._replace(tops=tops(logits, adjusted), stuck=stuck(adjusted), waiting=waiting(adjusted))


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [B, V] -> the largest of each row [B], and its place [B]. NaN is the largest."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # Of 16 x 128,256 logits numpy finds them in 0.12 ms, torch's `max` in 0.84.
        tokens = torch.from_numpy(logits.numpy().argmax(-1))
        return logits.gather(1, tokens[:, None])[:, 0], tokens
    return logits.max(-1)  # not argmax: 0.9 against 5.1 ms for 32 x 50257 bf16 on a CPU


def not_finite(values: Iterable[float]) -> list[int]:
    """The positions of those that are NaN or infinity."""
    return [i for i, value in enumerate(values) if not math.isfinite(value)]


def draw_at_once(logits: Tensor, requests: np.ndarray, draws: np.ndarray) -> Tensor:
    """`draw_rows` for a GPU without our kernels, by the same steps for all rows together: [b] tokens on the device,
    without waiting."""
    values = logits.float()
    temperature = to_device(torch.from_numpy(requests["temperature"].astype(np.float32)), logits.device)
    values = (values - values.max(-1, keepdim=True).values) / temperature[:, None].clamp(min=1e-30)
    top_k, top_p = requests["top_k"], requests["top_p"]
    vocab_size = values.shape[1]
    cut = (top_k > 0) & (top_k < vocab_size)
    if cut.any():
        values = _keep_top_k(values, np.where(cut, top_k, vocab_size))
    cut = (top_p > 0) & (top_p < 1)
    if cut.any():
        values = _keep_top_p(values, np.where(cut, top_p, 2.0))
    if requests["min_p"].any():
        # The largest value is 0, so e^value is the share of the most probable token.
        floor = to_device(torch.from_numpy(requests["min_p"].astype(np.float32)), values.device).log()[:, None]
        values = values.masked_fill(values < floor, -torch.inf)
    cumulative = values.softmax(-1).double().cumsum(-1)  # [b, V]
    u = to_device(torch.from_numpy(uniform(requests["seed"], draws)), logits.device)
    # The first token whose cumulative share is above u. A token of probability 0 adds nothing, so it is never first. As
    # u < 1, the threshold is below the last sum, except when rounding lifts it: then the likeliest token is taken.
    threshold = (u * cumulative[:, -1])[:, None]
    tokens = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    return torch.where(tokens < vocab_size, tokens, values.max(-1).indices)


def _keep_top_k(values: Tensor, top_k: np.ndarray) -> Tensor:
    """values [b, V]: those below their row's k-th largest become -inf; ties with it stay."""
    limited = np.where(top_k < values.shape[1], top_k, 1)
    largest = values.topk(int(limited.max()), dim=-1).values
    k = to_device(torch.from_numpy(limited), values.device)
    floor = largest.gather(1, k[:, None] - 1)
    everything = to_device(torch.from_numpy(top_k >= values.shape[1]), values.device)
    return values.masked_fill((values < floor) & ~everything[:, None], -torch.inf)


def _keep_top_p(values: Tensor, top_p: np.ndarray) -> Tensor:
    """values [b, V]: keeps the fewest likeliest tokens that together reach top_p; ties with the last one stay."""
    p = to_device(torch.from_numpy(top_p), values.device)[:, None]
    least = p * values.exp().sum(-1, keepdim=True, dtype=torch.float64)  # the largest value is 0
    largest = values.sort(-1, descending=True).values
    reached = largest.exp().double().cumsum(-1) >= least
    # Index of the first that reaches p. If none does (p > 1, or rounding), nothing is cut.
    found = reached.any(-1, keepdim=True)
    floor = largest.gather(1, reached.int().argmax(-1, keepdim=True))
    return values.masked_fill((values < floor) & found, -torch.inf)


EndOfModel = Callable[[np.ndarray], Tensor]  # the end of the last stage: flat indexes [n] -> logits [n, V of this rank]


class Layers(Protocol):
    """The layers of a stage."""

    vocabulary_shares: list[int]  # how many tokens of the vocabulary each tensor rank has
    kernels: str  # what computes it, in words for the log

    @property
    def kv_shape(self) -> KVShape | None: ...

    def prepare(self, kv: KVManager) -> None: ...

    def incoming(self, tokens: int) -> tuple[tuple[int, ...], torch.dtype] | None: ...


class StageModel(Layers, Protocol):
    """Layers that make hidden states or, at the last stage, what makes logits of them."""

    def forward(self, batch: Batch, kv: KVManager, plane: DataPlane, x: Tensor | None) -> Tensor | EndOfModel: ...


L = TypeVar("L", bound=Layers)


class OfStage(Generic[L]):
    """The part that the models of all stages share."""

    tokens: DeviceTokens | None = None  # the host tells all tokens

    def __init__(self, model: L) -> None:
        self.model = model

    @property
    def kernels(self) -> str:
        return self.model.kernels

    @property
    def kv_shape(self) -> KVShape | None:
        return self.model.kv_shape

    def incoming(self, tokens: int) -> tuple[tuple[int, ...], torch.dtype] | None:
        return self.model.incoming(tokens)

    def prepare(self, kv: KVManager, plane: DataPlane) -> None:
        self.model.prepare(kv)

    def release(self) -> None:
        pass

    def adapter_bytes(self, file: ReadAdapter) -> int:
        assert isinstance(self.model, Adaptable), "only stages that take adapters are asked"
        return self.model.adapter_bytes(file)

    def adapt(self, number: int, file: ReadAdapter | None) -> None:
        assert isinstance(self.model, Adaptable), "only stages that take adapters are asked"
        self.model.adapt(number, file)


class HiddenModel(OfStage[StageModel]):
    """`Model` of an earlier stage: its hidden states go to the next stage."""

    @torch.inference_mode()
    def run(self, batch: Batch, kv: KVManager, plane: DataPlane, x: Tensor | None) -> Output:
        hidden = self.model.forward(batch, kv, plane, x)
        assert isinstance(hidden, Tensor), "an earlier stage makes hidden states"
        return Output([], [], hidden)


class SamplingModel(OfStage[StageModel]):
    """`Model` of the last stage: its logits are gathered on tensor rank 0, which samples."""

    @torch.inference_mode()
    def run(self, batch: Batch, kv: KVManager, plane: DataPlane, x: Tensor | None) -> Output:
        head = self.model.forward(batch, kv, plane, x)
        assert not isinstance(head, Tensor), "the last stage makes logits"
        prompts = score_prompts(head, batch, plane, self.model.vocabulary_shares) if batch.scored else {}
        if not len(batch.out_at):
            return Output([], [], prompts=prompts)
        logits = plane.gather(head(batch.out_at), self.model.vocabulary_shares)
        if logits is None:
            return Output([], [])
        return sample(logits, batch.requests, batch.draws, batch.adjusted)._replace(prompts=prompts)


def score_prompts(head: EndOfModel, batch: Batch, plane: DataPlane, vocabulary_shares: list[int]) -> dict[int, bytes]:
    """The logprobs of the prompts whose requests ask for them, by member; right on tensor rank 0 alone."""
    prompts = PromptScores(batch)
    for part in prompts.pieces():
        logits = plane.gather(head(prompts.places[part]), vocabulary_shares)
        if logits is not None:
            prompts.add(part, logits)
    return prompts.packed()
