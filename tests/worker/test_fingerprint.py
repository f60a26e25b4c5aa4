"""The fingerprint of weights: another one for every change that matters, soon even where the weights are huge."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import make_gpt2, make_timed
from safetensors.torch import load_file, save_file

from orca_common.checkpoint import read_checkpoint
from orca_worker.iteration.model import Compute
from orca_worker.models.header import header_of
from orca_worker.models.weight_files import LEAST_BYTES, READ_BYTES, fingerprint
from orca_worker.partition import Types
from orca_worker.stage.stage import Stage, WeightsChanged

WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_gpt2(tmp_path / "model", heads=2, layers=2, hidden=16, vocab=97, positions=32, seed=1)


def huge(folder: Path, tensors: int, size: int, shards: int) -> Path:
    """A checkpoint whose tensors are holes of `size` bytes: it takes no place on a disk."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    shard_of: dict[str, str] = {}
    for shard in range(shards):
        names = [f"{shard}.{n}" for n in range(tensors // shards)]
        header = {
            name: {"dtype": "F16", "shape": [size // 2], "data_offsets": [n * size, (n + 1) * size]}
            for n, name in enumerate(names)
        }
        raw, file = json.dumps(header).encode(), folder / f"model-{shard}.safetensors"
        with file.open("wb") as opened:
            opened.write(len(raw).to_bytes(8, "little") + raw)
            opened.truncate(8 + len(raw) + len(names) * size)
        shard_of |= dict.fromkeys(names, file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
    return folder


def test_one_value_of_each_tensor_counts(model: Path) -> None:
    before, weights = fingerprint(model), load_file(model / WEIGHTS)
    seen = {before}
    for name in weights:
        changed = {key: tensor.clone() for key, tensor in weights.items()}
        changed[name].view(-1)[-1] += 1
        save_file(changed, model / WEIGHTS, metadata={"format": "pt"})
        seen.add(fingerprint(model))
    assert len(seen) == 1 + len(weights)
    save_file(weights, model / WEIGHTS, metadata={"format": "pt"})
    assert fingerprint(model) == before


def test_training_is_seen_in_every_large_tensor(tmp_path: Path) -> None:
    """Of large tensors only parts are read; a change of all their values is seen in any of them."""
    folder, size = huge(tmp_path / "model", tensors=60, size=4 << 20, shards=3), 4 << 20
    seen = {fingerprint(folder)}
    for shard in range(3):
        file = folder / f"model-{shard}.safetensors"
        for place in (-size, -7 * size):  # the last tensor of the file, and one in its middle
            with file.open("r+b") as opened:
                opened.seek(place, os.SEEK_END)
                opened.write(b"\1" * size)
            seen.add(fingerprint(folder))
    assert len(seen) == 7


def test_the_configuration_and_the_types_count(model: Path) -> None:
    seen = {fingerprint(model), fingerprint(model, "int8"), fingerprint(model, "int4")}
    weights = load_file(model / WEIGHTS)
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}, model / WEIGHTS)
    seen.add(fingerprint(model))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"layer_norm_epsilon": 1e-4}))
    seen.add(fingerprint(model))
    assert len(seen) == 5


def test_a_copy_has_the_same(model: Path, tmp_path: Path) -> None:
    assert fingerprint(shutil.copytree(model, tmp_path / "copy")) == fingerprint(model)


def test_the_hubs_cache_names_a_file_by_its_bytes(model: Path, tmp_path: Path) -> None:
    """Where it does, nothing of it needs to be read."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "aa").write_bytes((model / WEIGHTS).read_bytes())
    (blobs / "bb").write_bytes(b"")
    shutil.copy(model / "config.json", snapshot)
    found: list[str] = []
    for blob in ("aa", "bb", "aa"):
        (snapshot / WEIGHTS).unlink(missing_ok=True)
        (snapshot / WEIGHTS).symlink_to(blobs / blob)
        found.append(fingerprint(snapshot))
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("tensors", [700, 30_000])
def test_little_is_read_of_a_huge_model(tmp_path: Path, tensors: int) -> None:
    """350 GB, in 50 files."""
    folder = huge(tmp_path / "model", tensors, 350_000_000_000 // tensors // 2 * 2, 50)
    headers = sum(header_of(file)[0] for file in folder.glob("*.safetensors"))
    before = read_by_us()
    fingerprint(folder)
    index = (folder / "model.safetensors.index.json").stat().st_size
    most = max(READ_BYTES, LEAST_BYTES * tensors)
    assert read_by_us() - before < most + 2 * headers + index + 1_000_000


def read_by_us() -> int:
    """Bytes that this process has read by system calls."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


@pytest.mark.parametrize(
    "spans",
    [[[0, -1]], [[5, 4]], [[0, 1 << 80]], ["x"], [None], [[0, 8, 9]], [[True, 4]]],
)
def test_a_strangers_file_does_no_harm(tmp_path: Path, spans: list[object]) -> None:
    """What is wrong with it is its reader's to say."""
    folder = make_timed(tmp_path / "model")
    raw = json.dumps({str(n): {"data_offsets": span} for n, span in enumerate(spans)}).encode()
    (folder / WEIGHTS).write_bytes(len(raw).to_bytes(8, "little") + raw)
    assert len(fingerprint(folder)) == 16
    (folder / WEIGHTS).write_bytes(b"\xff" * 100)
    assert len(fingerprint(folder)) == 16


def test_a_rank_ends_whose_weights_changed_before_it_read_them(model: Path) -> None:
    stage = Stage(read_checkpoint(model), Types.of("float32"), torch.device("cpu"), 64, Compute(1))
    weights = load_file(model / WEIGHTS)
    save_file({name: tensor + 1 for name, tensor in weights.items()}, model / WEIGHTS)
    with pytest.raises(WeightsChanged, match="other weights than this rank has told"):
        stage.form(16)
