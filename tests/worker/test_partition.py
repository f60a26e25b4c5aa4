"""The partition of a model: every element is on the ranks where it belongs, and a rank reads only its own bytes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SHAPES, make_gpt2, make_shape
from safetensors.torch import load_file, save_file
from torch import Tensor

from orca_common.checkpoint import Checkpoint, read_checkpoint
from orca_common.errors import FailedPrecondition
from orca_worker.iteration.model import Loading
from orca_worker.models.families import topology
from orca_worker.models.gpt2.configuration import GPT2Config
from orca_worker.models.gpt2.layers import record
from orca_worker.models.weights import Weights
from orca_worker.partition import Place, Slice, Types, share

CUTS = [(1, 1), (2, 1), (1, 2), (3, 2), (2, 3), (6, 1), (1, 5)]
SIZES: dict[str, Any] = {"heads": 6, "layers": 5, "hidden": 24, "vocab": 101, "positions": 48, "seed": 1, "n_inner": 50}


def places(tp: int, pp: int) -> list[Place]:
    return [Place(tp, pp, stage, rank) for stage in range(pp) for rank in range(tp)]


def test_shares() -> None:
    assert [share(7, 3, i) for i in range(3)] == [range(3), range(3, 5), range(5, 7)]
    assert [share(4, 2, i) for i in range(2)] == [range(2), range(2, 4)]
    assert [len(share(2, 3, i)) for i in range(3)] == [1, 1, 0]


def test_runs_are_ranges_that_lie_together() -> None:
    rows = Slice("", (5, 4), 0, (range(1, 3),))
    assert (rows.size, list(rows.runs())) == ((2, 4), [(4, 8)])
    columns = Slice("", (2, 6), 1, (range(1, 2), range(3, 4), range(5, 6)))
    assert (columns.size, list(columns.runs())) == ((2, 3), [(1, 1), (3, 1), (5, 1), (7, 1), (9, 1), (11, 1)])
    neighbours = Slice("", (2, 4), 1, (range(2), range(2, 4)))
    assert list(neighbours.runs()) == [(0, 8)]  # a whole tensor is one range
    assert list(Slice("", (3,), 0, (range(1, 1),)).runs()) == []


def of_ranges(tensor: Tensor, part: Slice) -> Tensor:
    index = torch.tensor([i for one in part.ranges for i in one])
    return tensor.index_select(part.axis, index)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("tp", "pp"), CUTS)
def test_every_element_has_its_place(tmp_path: Path, tp: int, pp: int, tied: bool) -> None:
    folder = make_gpt2(tmp_path, **SIZES, tie_word_embeddings=tied)
    tensors = {n.removeprefix("transformer."): t for n, t in load_file(folder / "model.safetensors").items()}
    config = GPT2Config.read(read_checkpoint(folder))
    held = {name: torch.zeros(t.shape, dtype=torch.int64) for name, t in tensors.items()}
    for place in places(tp, pp):
        slices = record(config, place).slices
        for name, part in slices.items():
            index = torch.tensor([i for one in part.ranges for i in one])
            held[name].index_add_(part.axis, index, torch.ones(part.size, dtype=torch.int64))
    for name, count in held.items():
        everywhere = ".ln_" in name or name.startswith("ln_f")
        times = tp if everywhere else 2 if name == "wte.weight" and tied and pp > 1 else 1
        assert (count == times).all(), name
    assert [i for stage in range(pp) for i in Place(tp, pp, stage).layers(config.layers)] == list(range(5))


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize(("tp", "pp"), CUTS)
def test_a_rank_reads_its_own_bytes_alone(tmp_path: Path, tp: int, pp: int, shards: bool) -> None:
    folder = make_gpt2(tmp_path, **SIZES)
    tensors = load_file(folder / "model.safetensors")
    if shards:
        names = sorted(tensors)
        files = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(names)}
        for file in set(files.values()):
            save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        (folder / "model.safetensors").unlink()
    checkpoint = read_checkpoint(folder)
    config = GPT2Config.read(checkpoint)
    for place, told in zip(places(tp, pp), topology(checkpoint, tp, pp, Types.of("float32")), strict=True):
        slices = record(config, place).slices
        loading = Loading()
        weights = Weights(folder, "transformer.", slices, torch.float32, torch.device("cpu"), loading)
        assert loading.sentence == f"0% of {loading.whole / 1e6:.1f} MB of weights are read"
        before = bytes_of_this_thread()
        for name, part in slices.items():
            assert torch.equal(weights.get(name), of_ranges(tensors["transformer." + name], part)), name
        spent = bytes_of_this_thread() - before
        assert weights.bytes_read == told.weight_bytes == sum(4 * part.elements for part in slices.values())
        assert 0 <= spent - weights.bytes_read < 1024  # the kernel's own count, with the counting
        assert weights.find("h.0.attn.bias") is None
        assert (loading.read, loading.sentence) == (weights.bytes_read, None)


@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_hold_every_element_of_every_family(tmp_path: Path, shape: str) -> None:
    """Each once, or on all ranks: norms, and key/value heads that are fewer than the ranks. Nothing else is read."""
    folder = make_shape(tmp_path, shape)
    checkpoint = read_checkpoint(folder)
    heads = [n for n in (2, 3, 5) if fits(checkpoint, n)]
    assert heads
    for tp in (1, *heads):
        held: dict[str, Tensor] = {}
        for told in topology(checkpoint, tp, 2, Types.of("float32")):
            for name, part in told.slices.items():
                index = torch.tensor([i for one in part.ranges for i in one])
                count = held.setdefault(name, torch.zeros(part.shape, dtype=torch.int64))
                count.index_add_(part.axis, index, torch.ones(part.size, dtype=torch.int64))
        tensors = load_file(folder / "model.safetensors")
        whole = {name for name in tensors if name in held} | {
            name.partition(".")[2] for name in tensors if name.partition(".")[2] in held
        }
        assert whole == held.keys()
        assert len(held) == len(tensors)
        for name, count in held.items():
            least, most = int(count.min()), int(count.max())
            assert least >= 1, name
            if ".weight" in name and count.dim() == 2 and not any(part in name for part in ("k_proj", "v_proj")):
                assert most <= 2, name  # the table of a tied head is on the first and on the last stage
            else:
                assert most <= tp, name


def fits(checkpoint: Checkpoint, tp: int) -> bool:
    try:
        topology(checkpoint, tp, 2, Types.of("float32"))
    except FailedPrecondition:
        return False
    return True


def bytes_of_this_thread() -> int:
    """How many bytes it has read, as the kernel counts. (xdist's thread reads messages meanwhile.)"""
    return int(Path("/proc/thread-self/io").read_text().split("rchar:")[1].split()[0])


def test_topology_of_figure_6(tmp_path: Path) -> None:
    """4 layers on 2 stages of 3 tensor ranks."""
    folder = make_gpt2(tmp_path, **{**SIZES, "layers": 4})
    ranks = topology(read_checkpoint(folder), 3, 2, Types.of("bfloat16"))
    assert [(rank.stage, rank.tensor_rank, rank.layers) for rank in ranks] == [
        (0, 0, range(2)),
        (0, 1, range(2)),
        (0, 2, range(2)),
        (1, 0, range(2, 4)),
        (1, 1, range(2, 4)),
        (1, 2, range(2, 4)),
    ]
    assert {rank.slot_bytes for rank in ranks} == {2 * 2 * (2 * 4) * 2}  # k and v, layers, two heads of 4, bytes
    first, second = ranks[0].slices, ranks[1].slices
    assert second["h.0.attn.c_attn.weight"].ranges == (range(8, 16), range(32, 40), range(56, 64))
    assert second["h.1.attn.c_proj.weight"].ranges == (range(8, 16),)
    assert [rank.slices["h.0.mlp.c_fc.bias"].ranges[0] for rank in ranks[:3]] == [
        range(17),
        range(17, 34),
        range(34, 50),
    ]
    assert "h.0.mlp.c_proj.bias" in first
    assert "h.0.mlp.c_proj.bias" not in second
    assert [len(rank.slices["wte.weight"].ranges[0]) for rank in ranks] == [34, 34, 33] * 2
