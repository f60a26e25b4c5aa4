"""Fields that a config.json leaves out have the values of transformers' own configuration class (5.23)."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_shape
from reference import Reference
from transformers import AutoConfig
from worker.driver import Sampled, TinyEngine, make_stage

from orca_common.checkpoint import read_checkpoint
from orca_worker.models.families import FAMILIES, family_of
from orca_worker.models.recorded import RecordedFamily

KINDS = [kind for kind in FAMILIES if not kind.startswith("orca_")]
ALWAYS = ("model_type", "vocab_size", "max_position_embeddings", "n_positions")  # a file must have them
# Sizes that no class has by default, so that a default is not taken for the file's own number.
SMALL = {"hidden_size": 2048, "n_embd": 1536, "d_model": 256, "d_kv": 32, "head_dim": 64, "num_hidden_layers": 3}
WINDOWED = {"use_sliding_window": True, "max_window_layers": 1}


def read(folder: Path, config: dict[str, Any]) -> object:
    """A family's configuration."""
    (folder / "config.json").write_text(json.dumps({**config, "orca_random_weights": 1}))
    checkpoint = read_checkpoint(folder)
    family = family_of(checkpoint)
    assert isinstance(family, RecordedFamily)
    return family.read(checkpoint)


def whole(config: dict[str, Any]) -> dict[str, Any]:
    """All fields of a configuration class, with the defaults of those that are not given."""
    made = AutoConfig.for_model(**config).to_dict()
    return {name: value for name, value in made.items() if value is not None}


@pytest.mark.parametrize("more", [{}, WINDOWED], ids=["plain", "windowed"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_with_nothing_but_its_type(tmp_path: Path, kind: str, more: dict[str, Any]) -> None:
    full = whole({"model_type": kind, **more})
    bare = {name: full[name] for name in ALWAYS if name in full}
    assert read(tmp_path, bare | more) == read(tmp_path, full)


@pytest.mark.parametrize("kind", KINDS)
def test_each_field_alone_may_be_missing(tmp_path: Path, kind: str) -> None:
    known = AutoConfig.for_model(kind).to_dict()
    full = whole({"model_type": kind, **{name: value for name, value in SMALL.items() if name in known}})
    full.pop("layer_types", None)  # follows from the others
    for name in full.keys() - {*ALWAYS}:
        bare = {key: value for key, value in full.items() if key != name}
        assert read(tmp_path, bare) == read(tmp_path, whole(bare)), name


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_positions_behind_the_length_that_a_scaling_stretches(tmp_path: Path, kind: str) -> None:
    """Such files give the length before (as published models of Qwen do): transformers goes on, vLLM multiplies."""
    rope = {"rope_type": kind, "rope_theta": 1000.0, "factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 16
    folder = make_shape(tmp_path, "llama, 2 K/V heads", max_position_embeddings=16, rope_parameters=rope)
    assert read_checkpoint(folder).max_positions == 64
    request = Sampled([7 * n % 211 for n in range(30)], 30)
    TinyEngine(make_stage(folder, 128, 16), 128, 16).run([request])
    assert request.made == Reference(folder).greedy(request.prompt, 30)


def test_a_gemma_says_the_length_behind(tmp_path: Path) -> None:
    scaled = {"rope_type": "linear", "factor": 8.0}
    config = {"model_type": "gemma3_text", "vocab_size": 97, "max_position_embeddings": 131072, "rope_scaling": scaled}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_checkpoint(tmp_path).max_positions == 131072
