"""The independent implementation that tokens are compared with: transformers, one request at a time."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import GPT2LMHeadModel


class Reference:
    """A checkpoint in transformers' own GPT-2, float32."""

    def __init__(self, folder: Path) -> None:
        self._model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """The greedy continuation of a prompt."""
        tokens: list[int] = []
        step, past = torch.tensor([list(prompt)]), None
        while len(tokens) < max_new_tokens:
            output = self._model(step, past_key_values=past, use_cache=True)
            tokens.append(int(output.logits[0, -1].argmax()))
            step, past = torch.tensor([[tokens[-1]]]), output.past_key_values
        return tokens
