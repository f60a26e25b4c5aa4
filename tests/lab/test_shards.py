"""The shard benchmark on a CPU: what it times is the model that serves, and its counts are right."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.table import Table
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel
from worker.driver import Sampled, TinyEngine

from orca_lab import shards
from orca_lab.roofline import IN_TABLES, Work, accelerator, work
from orca_lab.shapes import SHAPES, Shape, gpt
from orca_lab.shards import BLOCK_SIZE, INCREMENT, INITIATION, Case, Row, formed, measure_place, places
from orca_worker.iteration.model import Compute, Model
from orca_worker.models.gpt2.layers import record
from orca_worker.models.plain import TorchStage, padded_rows
from orca_worker.models.random_weights import RandomWeights
from orca_worker.partition import SINGLE, Place, Types
from orca_worker.sampling.sampling import SamplingModel
from orca_worker.stage.stage import Stage

DEVICE = torch.device("cpu")
HIDDEN = 48
TINY = Shape("tiny", gpt(4, HIDDEN, 4, positions=64, vocab_size=101), 2, 2)


def test_table_1() -> None:
    """The paper's parameter counts, from the shapes."""
    for name, count in {"13b": 13e9, "101b": 101e9, "175b": 175e9, "341b": 341e9}.items():
        shape = SHAPES[f"gpt3-{name}"]
        slices = record(shape.config, SINGLE).slices.values()
        assert sum(part.elements for part in slices) == pytest.approx(count, rel=0.015)
        ranks = places(shape.tensor_parallel, shape.pipeline_parallel)
        assert [p.stage for p in ranks] == sorted({0, min(1, shape.pipeline_parallel - 1), shape.pipeline_parallel - 1})


@pytest.mark.parametrize("place", [*places(2, 2), *places(4, 2)], ids=str)
def test_a_shard_runs_and_sends_what_its_shapes_say(place: Place) -> None:
    todo = [Case(INITIATION, 3, 20), Case(INCREMENT, 3, 20)]
    rows = measure_place(TINY, place, "float32", DEVICE, todo, repetitions=2)
    assert [row.case for row in rows] == todo
    for row, tokens in zip(rows, (60, 3), strict=True):
        assert len(row.seconds) == 2
        assert 0 < row.seconds[0] <= row.median <= row.seconds[1]
        assert row.floor is None
        states = tokens * HIDDEN * 4  # bytes
        # the embeddings' sum, two sums a layer, the way to the next stage; a rank sends each sum to every other
        sums, onward = (1 + 2 * 2, 1) if place.is_first else (2 * 2, 0)
        others = place.tensor_parallel - 1
        assert row.sent_bytes == (sums * others + onward) * states
        kept = 2 * 2 * (HIDDEN // place.tensor_parallel)  # k and v, layers, its share of the heads
        assert row.kv_bytes == 3 * 2 * BLOCK_SIZE * kept * 4


@pytest.mark.parametrize("place", [*places(1, 1), *places(2, 2), *places(4, 3)], ids=str)
def test_matrices_are_those_of_the_partition(place: Place) -> None:
    """What torch multiplies, counted by torch, on a shard as it runs."""
    todo = [Case(INITIATION, 3, 20), Case(INCREMENT, 3, 20)]
    with formed(TINY, place, "float32", DEVICE, 2 * 3 * 2 * BLOCK_SIZE) as stage:
        for case in todo:
            with FlopCounterMode(display=False) as count:
                stage.run(case.message(TINY.config.vocab_size))
            needed = shards.work_of(TINY, place, "float32", case).flop
            if place.is_last:  # the rows of the head's table behind its last token
                shares = record(TINY.config, place).vocabulary_shares
                needed += 2 * HIDDEN * case.batch * (padded_rows(shares) - shares[place.tensor_rank])
            if case.phase == INITIATION:  # on a CPU torch does not count its fused attention
                pairs = 3 * 20 * 21 // 2
                needed -= 4 * pairs * len(place.layers(TINY.config.layers)) * HIDDEN // place.tensor_parallel
            assert count.get_total_flops() == needed


class Kept(RandomWeights):
    """Remembers what it gave."""

    given: dict[str, Tensor]

    def find(self, name: str, dtype: torch.dtype | None = None) -> Tensor | None:
        tensor = super().find(name, dtype)
        if tensor is not None:
            self.given[name] = tensor
        return tensor


def test_random_weights_make_the_model_that_transformers_knows() -> None:
    config = gpt(3, HIDDEN, 4, positions=64, vocab_size=101)
    kept = Kept(5, record(config, SINGLE).slices, torch.float32, DEVICE, spread=0.5)
    kept.given = {}

    def load(place: Place) -> tuple[Model, int]:
        return SamplingModel(TorchStage(record(config, place), kept, Types.of("float32"), DEVICE)), kept.bytes_made

    stage = Stage(config.checkpoint("random"), Types.of("float32"), DEVICE, 480, Compute(1), load)
    stage.form(4)
    stage.allocate(480, 4)
    chance = random.Random(3)
    requests = [Sampled([chance.randrange(101) for _ in range(chance.randint(1, 20))], 8) for _ in range(6)]
    TinyEngine(stage, 480, 4).run(requests)
    said = config.checkpoint("random").config
    model = GPT2LMHeadModel(GPT2Config(**said, vocab_size=101, n_positions=64, bos_token_id=None, eos_token_id=None))
    weights = {f"transformer.{name}": tensor for name, tensor in kept.given.items()}
    model.load_state_dict(weights | {"lm_head.weight": kept.given["wte.weight"]})
    assert sum(p.nbytes for p in model.parameters()) == kept.bytes_made
    model.eval()
    for request in requests:
        ids = list(request.prompt)
        with torch.inference_mode():
            for _ in range(8):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert request.made == ids[len(request.prompt) :]
    assert len({tuple(request.made) for request in requests}) > 3


def test_floors() -> None:
    """Against shared numbers of GPT-3 13B in bfloat16 at context 300: 25.9 GB for one request and 33.5 GB for 32."""
    shape = SHAPES["gpt3-13b"]
    whole = record(shape.config, SINGLE)
    for batch, read in ((1, 25.9e9), (32, 33.5e9)):
        assert work(whole, 2, [(299, 1)] * batch).bytes == pytest.approx(read, rel=0.005)
    prefill = work(whole, 2, [(0, 512)])
    assert prefill.flop == pytest.approx(13.0e12, rel=0.02)
    h200 = accelerator("NVIDIA H200")
    assert h200 is not None
    assert prefill.floor(h200, "bfloat16") == prefill.flop / 989e12
    assert Work(bytes=48 * 10**9, flop=1).floor(h200, "float32") == 0.01
    assert accelerator("NVIDIA H100 80GB HBM3") is IN_TABLES[0]
    assert accelerator("CPU") is None


def test_too_many_slots_are_refused() -> None:
    with (
        pytest.raises(SystemExit, match="slots of 384 bytes are needed"),
        formed(TINY, Place(2, 2), "float32", DEVICE, 1 << 40),
    ):
        pass


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    file = tmp_path / "x.json"
    common = ["shards", "--model", "tiny", "--batch", "1", "2", "--prompt", "5"]
    monkeypatch.setattr(sys, "argv", [*common, "--repetitions", "3", "--device", "cpu", "--json", str(file)])
    shards.main()
    assert "without communication" in capsys.readouterr().out
    told = json.loads(file.read_text())
    assert (told["device"], told["dtype"]) == ("CPU", "bfloat16")
    assert [(row["place"]["stage"], row["case"]["phase"], row["case"]["batch"]) for row in told["rows"]] == [
        (stage, phase, batch) for stage in range(2) for batch in (1, 2) for phase in (INITIATION, INCREMENT)
    ]
    assert all(len(row["seconds"]) == 3 for row in told["rows"])
    monkeypatch.setattr(sys, "argv", [*common, "--floors"])
    shards.main()
    assert "floors, computed" in capsys.readouterr().out


def test_a_floor_is_shown_beside_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row(SINGLE, Case(INCREMENT, 1, 8), 10**9, 10**6, 0, [0.004, 0.005, 0.007], [0.001], Work(1, 1), 0.004)
    shards.Console(width=150).print(shards.measured_table("t", [row]))
    shown = capsys.readouterr().out
    assert "5.00" in shown
    assert "4.00 to 7.00" in shown
    assert "80%" in shown


def rows_of(table: Table, capsys: pytest.CaptureFixture[str]) -> tuple[str, list[list[str]]]:
    """The title of a table, and its rows below the head."""
    shards.Console(width=150).print(table)
    title, *lines = capsys.readouterr().out.splitlines()
    rows = [line.strip("│").split("│") for line in lines if line.startswith("│")]
    return title.strip(), [[cell.strip() for cell in row] for row in rows]


def test_the_table_of_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    last = Row(
        Place(2, 3, 2),
        Case(INITIATION, 8, 20),
        2_500_000,
        10**6,
        1_250_000,
        [0.004, 0.006],
        [0.001, 0.003],
        Work(1, 1),
        0.003,
    )
    plain = replace(last, place=SINGLE, case=Case(INCREMENT, 1, 8), floor=None)
    title, rows = rows_of(shards.measured_table("a title", [last, plain]), capsys)
    assert title == "a title"
    assert rows == [
        ["3 of 3", "0.003 GB", "initiation", "8", "20", "5.00", "4.00 to 6.00", "2.00", "3.00", "60%", "1.25 MB"],
        ["1 of 1", "0.003 GB", "increment", "1", "8", "5.00", "4.00 to 6.00", "2.00", "-", "-", "1.25 MB"],
    ]


def test_the_table_of_floors(capsys: pytest.CaptureFixture[str]) -> None:
    """GPT-3 13B's last stage of two: half of the layers, and the head."""
    shape, place, case = SHAPES["gpt3-13b"], Place(1, 2, 1), Case(INCREMENT, 32, 299)
    title, [row] = rows_of(shards.floor_table("floors", shape, "bfloat16", [place], [case]), capsys)
    needed, weights = (
        shards.work_of(shape, place, "bfloat16", case),
        shards.share_of(shape, place, "bfloat16").weight_bytes,
    )
    assert title == "floors"
    assert 12e9 < weights < 14e9
    assert row == [
        *("2 of 2", f"{weights / 1e9:.3f} GB", "increment", "32", "299"),
        *(f"{needed.bytes / 1e9:.2f} GB", f"{needed.flop / 1e12:.2f}"),
        *(f"{needed.bytes / rate * 1e3:.2f}" for rate in (3.35e12, 4.8e12)),
    ]


def test_which_ranks_and_cases_are_timed() -> None:
    assert places(8, 1) == [Place(8, 1, 0)]
    assert places(8, 2) == [Place(8, 2, 0), Place(8, 2, 1)]
    assert places(4, 5) == [Place(4, 5, 0), Place(4, 5, 1), Place(4, 5, 4)]
    assert shards.cases([1, 2], [5, 9]) == [
        Case(phase, batch, prompt) for prompt in (5, 9) for batch in (1, 2) for phase in (INITIATION, INCREMENT)
    ]
    assert [Case(INCREMENT, 3, prompt).slots for prompt in (14, 15, 16)] == [48, 48, 96]
    assert Case(INITIATION, 2, 7).requests == [(0, 7), (0, 7)]
    assert Case(INCREMENT, 2, 7).requests == [(7, 1), (7, 1)]


@pytest.mark.parametrize(
    ("device", "bandwidth"),
    [("NVIDIA H100 80GB HBM3", 3.35e12), ("NVIDIA H100 PCIe", 2.0e12), ("NVIDIA H100 NVL", 3.9e12)],
)
def test_an_accelerator_by_the_longest_name_that_fits(device: str, bandwidth: float) -> None:
    on = accelerator(device)
    assert on is not None
    assert on.bandwidth == bandwidth
    assert set(on.peak) == {"bfloat16", "float16", "float32"}
