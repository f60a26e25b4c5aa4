"""The independent implementation that tokens are compared with: transformers, one request at a time."""

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


def prefix_mask(tokens: int, prompt: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The summands [1, 1, tokens, tokens] of scores in a prefix LM: each token sees those before it, and the prompt."""
    at = torch.arange(tokens)
    seen = at <= at[:, None].clamp(min=prompt - 1)
    return torch.zeros(1, 1, tokens, tokens, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


TIE = 1e-3  # of logits; in the tests' models another order of a float32 sum makes a thousandth of it


class Known(NamedTuple):
    """A prompt, and the tokens that must follow it."""

    prompt: list[int]
    tokens: list[int]


class Reference:
    """A checkpoint in transformers' own implementation of its family, float32.

    One thread: the models are small, and a second one spins while it waits. On two busy cores, 16 requests of the
    demo model took 9 s of CPU with two threads and 1.3 s with one.
    """

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def sampling(self, prompt: Sequence[int]) -> dict[str, Any]:
        """The sampling parameters with which a request gets the tokens of `continued`."""
        return {}

    def greedy(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """The greedy continuation of a prompt."""
        return self.continued(prompt, max_new_tokens)[0]

    @torch.inference_mode()
    def continued(self, prompt: Sequence[int], max_new_tokens: int) -> tuple[list[int], float]:
        """The greedy continuation, and the smallest distance between the two largest logits on its way.

        If the distance is as small as float32's rounding, another order of the same sums may give another token.
        """
        tokens: list[int] = []
        margin = math.inf
        step, past = torch.tensor([list(prompt)]), None
        while len(tokens) < max_new_tokens:
            output = self._model(step, past_key_values=past, use_cache=True)
            first, second = output.logits[0, -1].topk(2).values.tolist()
            margin = min(margin, first - second)
            tokens.append(int(output.logits[0, -1].argmax()))
            step, past = torch.tensor([[tokens[-1]]]), output.past_key_values
        return tokens, margin

    @torch.inference_mode()
    def adjusted(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        repetition: float = 1.0,
        presence: float = 0.0,
        frequency: float = 0.0,
        bias: Mapping[int, float] | None = None,
    ) -> tuple[list[int], float]:
        """As `continued`, with transformers' own processors, and presence and frequency as OpenAI documents them."""
        penalty = RepetitionPenaltyLogitsProcessor(repetition)
        biases = SequenceBiasLogitsProcessor([[[i], value] for i, value in bias.items()]) if bias else None
        tokens: list[int] = []
        margin = math.inf
        for _ in range(max_new_tokens):
            ids: Any = torch.tensor([[*prompt, *tokens]])
            logits: torch.Tensor = penalty(ids, self._model(ids, use_cache=False).logits[:, -1])
            for token, times in Counter(tokens).items():
                logits[0, token] -= presence + frequency * times
            if biases is not None:
                logits = biases(ids, logits)
            first, second = logits[0].topk(2).values.tolist()
            margin = min(margin, first - second)
            tokens.append(int(logits[0].argmax()))
        return tokens, margin

    @torch.inference_mode()
    def drawable(
        self, prompt: Sequence[int], tokens: Sequence[int], *, temperature: float, top_k: int, top_p: float
    ) -> list[bool]:
        """Of each token that was drawn after a prompt: whether transformers' own filters leave it to be drawn."""
        ids: Any = torch.tensor([[*prompt, *tokens]])
        logits: Any = self._model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        filters = (TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p))
        for one in filters:
            logits = one(ids, logits)
        return [bool(row[token] > -math.inf) for row, token in zip(logits, tokens, strict=True)]

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """[T, V] log-probabilities of what follows each of T tokens."""
        return self._model(torch.tensor([list(tokens)]), use_cache=False).logits[0].log_softmax(-1)

    def known(self, prompts: Iterable[tuple[list[int], int]]) -> Iterator[Known]:
        """Prompts, each with its number of new tokens, and their continuations.

        Leaves out those with a token so near a tie that the order of a sum decides it.
        """
        for prompt, new_tokens in prompts:
            tokens, margin = self.continued(prompt, new_tokens)
            if margin > TIE:
                yield Known(prompt, tokens)

    def random(self, draw: random.Random, prompt: tuple[int, int], new_tokens: tuple[int, int]) -> Iterator[Known]:
        """Random prompts without end; `prompt` and `new_tokens` are the shortest and the longest of each."""
        vocabulary = range(self._model.config.vocab_size)
        return self.known(
            (draw.choices(vocabulary, k=draw.randint(*prompt)), draw.randint(*new_tokens)) for _ in count()
        )


class PrefixLM(Reference):
    """Any decoder with the mask of a prefix LM, by which transformers computes what it is given."""

    @torch.inference_mode()
    def continued(self, prompt: Sequence[int], max_new_tokens: int) -> tuple[list[int], float]:
        ids, margin = list(prompt), math.inf
        for _ in range(max_new_tokens):
            mask = prefix_mask(len(ids), len(prompt))
            logits = self._model(torch.tensor([ids]), attention_mask=mask, use_cache=False).logits[0, -1]
            first, second = logits.topk(2).values.tolist()
            margin = min(margin, first - second)
            ids.append(int(logits.argmax()))
        return ids[len(prompt) :], margin
