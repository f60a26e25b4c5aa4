"""A model that computes nothing and takes a given time for each iteration of a stage."""

import json
import shutil
from pathlib import Path

from .stack import DEMO_MODEL


def make_timed_model(folder: Path, seconds: float = 0.0) -> Path:
    """A checkpoint of type `orca_timed` with the demo model's tokens; `seconds` of each stage and iteration."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    vocab_size = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]
    config = {"model_type": "orca_timed", "vocab_size": vocab_size, "n_positions": 1 << 20, "seconds": seconds}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
