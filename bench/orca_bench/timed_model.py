"""The model of the benchmarks: it computes nothing and takes a given time for each iteration of a stage."""

import json
import shutil
from pathlib import Path

from orca_local.stack import DEMO_MODEL


def make_timed_model(folder: Path, seconds: float = 0.0) -> Path:
    """A checkpoint of type `orca_timed` with the demo model's tokenizer; `seconds` of each stage and iteration."""
    folder.mkdir(parents=True)
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    config = {"model_type": "orca_timed", "vocab_size": 4096, "n_positions": 1 << 20, "seconds": seconds}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
