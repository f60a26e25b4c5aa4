"""Cost models: the A100 model over FasterTransformer's own table, memory of the paper's models, and a fit."""

import random

import pytest

from orca_lab.cost import A100, A100_40, A100_80, TABLE_1, TERMS, Gpt, Load, errors_of, fit, terms
from orca_lab.shapes import PARTITIONS, SHAPES
from orca_worker.models.families import topology
from orca_worker.partition import Types

NEOX_20B, GPT_175B = Gpt("20b", 44, 6144), TABLE_1["175b"][0]


@pytest.mark.parametrize(
    ("model", "tp", "batch", "inputs", "outputs", "measured", "ratio"),
    [  # FasterTransformer's guide to GPT, A100-80GB: seconds of a batch
        (NEOX_20B, 1, 1, 80, 200, 5.609, 1.02),
        (GPT_175B, 8, 1, 128, 8, 0.489, 0.72),
        (GPT_175B, 8, 1, 512, 32, 1.720, 0.86),
        (GPT_175B, 8, 16, 512, 32, 3.706, 0.98),
    ],
)
def test_the_a100_model_over_fastertransformers_table(
    model: Gpt, tp: int, batch: int, inputs: int, outputs: int, measured: float, ratio: float
) -> None:
    cost = A100(model, tp, 1, A100_80)
    first = Load(batch, 0, 0, batch * inputs, batch * inputs**2, batch * inputs, batch)
    later = [Load(batch, batch, batch * (inputs + n), 0, 0, 0, batch) for n in range(1, outputs)]
    seconds = sum(cost.stage(0, load) + cost.host for load in (first, *later))
    assert seconds / measured == pytest.approx(ratio, abs=0.02)


def test_fastertransformer_runs_out_of_memory_where_the_paper_says() -> None:
    for name, most in (("13b", 4), ("101b", 8), ("175b", 16)):
        cost = A100.of_the_paper(name)
        assert cost.allocates(most), name
        assert not cost.allocates(2 * most), name


def test_phi_multiplies_the_stages_alone() -> None:
    load = Load(8, 8, 2400, 0, 0, 0, 8)
    plain, slower = A100.of_the_paper("175b"), A100.of_the_paper("175b", phi=1.25)
    assert slower.stage(0, load) == pytest.approx(1.25 * plain.stage(0, load))
    assert (slower.host, slower.hop(load)) == (plain.host, plain.hop(load))


def test_table_1_uses_the_smallest_powers_of_two_that_hold_the_weights() -> None:
    for name, (model, tp, pp) in TABLE_1.items():
        assert A100(model, tp, pp).slots > model.positions, name
        if tp * pp > 1:
            smaller = (tp, pp // 2) if pp > 1 else (tp // 2, 1)
            assert A100(model, *smaller).slots == 0, name


@pytest.mark.parametrize("name", PARTITIONS)
def test_weights_and_slots_are_those_of_our_partitions(name: str) -> None:
    tp, pp = PARTITIONS[name]
    shares = topology(SHAPES[name].config.checkpoint(name), tp, pp, Types.of("float16"))
    cost = A100.of_the_paper(name.removeprefix("gpt3-"))
    assert cost.weight_bytes == pytest.approx(max(share.weight_bytes for share in shares), rel=0.005)
    assert cost.slot_bytes == max(share.slot_bytes for share in shares)
    assert cost.hardware == A100_40


def test_a_fit_finds_what_made_the_times() -> None:
    chance = random.Random(1)
    true = (4e-3, 0.0, 1e-4, 2e-7, 3e-5, 1e-8, 5e-5)
    loads = list[Load]()
    for _ in range(300):
        increments, prompts = chance.randint(0, 32), chance.choice([0, 0, 0, 1, 2])
        sizes = [chance.randint(32, 512) for _ in range(prompts)]
        context = sum(chance.randint(33, 640) for _ in range(increments))
        rows = increments + prompts
        loads.append(Load(rows, increments, context, sum(sizes), sum(n * n for n in sizes), sum(sizes), rows))
    loads = [load for load in loads if load.rows]
    exact = [sum(c * x for c, x in zip(true, terms(load), strict=True)) for load in loads]
    assert errors_of(fit(loads, exact), loads, exact) == pytest.approx((0, 0), abs=1e-6)
    noisy = [seconds * chance.uniform(0.95, 1.05) for seconds in exact]
    found = fit(loads[::2], noisy[::2])
    assert min(found) >= 0
    assert len(found) == len(TERMS)
    mean, of_sum = errors_of(found, loads[1::2], noisy[1::2])
    assert mean < 0.04
    assert abs(of_sum) < 0.01
    late = [seconds * chance.choice([1.0, 1.0, 1.0, 1.6]) for seconds in exact]  # as where a thread was kept waiting
    assert errors_of(fit(loads, late), loads, late)[1] == pytest.approx(0, abs=1e-6)


def test_a_fit_without_measurements_is_refused() -> None:
    for loads, seconds in (([], []), ([Load(1, 1, 1, 0, 0, 0, 1)], [0.0])):
        with pytest.raises(ValueError, match="a fit needs measured iterations"):
            fit(loads, seconds)
