"""The demo model's training: which tokens count as repetitions, and the files that come out."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel

from orca_lab.train_demo import repeats, save


def test_repeats_are_ends_of_runs_that_came_before() -> None:
    """Those of their own row alone; runs may overlap."""
    ids = torch.tensor([[1, 2, 3, 1, 2, 3, 1], [5, 5, 5, 5, 5, 1, 2], [1, 2, 3, 4, 5, 6, 7]])
    found = repeats(ids, length=3).nonzero().tolist()
    assert found == [[0, 5], [0, 6], [1, 3], [1, 4]]


def test_everyone_may_read_its_files(tmp_path: Path) -> None:
    """A server runs as another user than the one who has trained."""
    save(
        GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=4, n_head=1, vocab_size=5)),
        Tokenizer(models.BPE()),
        tmp_path / "out",
    )
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= modes.keys()
    assert all(mode & 0o444 == 0o444 for mode in modes.values()), modes
