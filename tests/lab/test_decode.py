"""Decode of whole models is timed in the stage that serves, and beside transformers' own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from orca_lab import cuda_kernels, decode
from orca_lab.cuda_kernels import Layer
from orca_lab.decode import MODELS, main, write_model
from orca_lab.roofline import Work
from orca_lab.shapes import gpt

CPU = torch.device("cpu")

COMMON = ["--model", "llama-small", "--device", "cpu", "--batch", "1", "3", "--context", "20", "--repetitions", "2"]


def rows_of(capsys: pytest.CaptureFixture[str], *more: str) -> list[dict[str, Any]]:
    main([*COMMON, *more])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("more", [[], ["--peer"]], ids=["orca", "peer"])
def test_a_line_for_each_case(capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    measured, ready, *cases = rows_of(capsys, *more)
    assert measured["copy_bytes_per_second"] > 0 < measured["product_flop_per_second"]
    assert measured["device"] == "CPU"
    about = {"model": "llama-small", "dtype": "bfloat16", "engine": "transformers" if more else "orca"}
    about |= {} if more else {"graphs": True, "quantize": None}
    assert ready.pop("ready_seconds") > 0
    assert ready == about
    assert [(row["batch"], row["context"]) for row in cases] == [(1, 20), (3, 20)]
    for row in cases:
        assert about.items() <= row.items()
        assert 0 < row["fastest"] <= row["milliseconds"] <= row["slowest"]
        assert 0 < row["host_milliseconds"] <= row["slowest"]
        rate = row["bytes"] / row["milliseconds"] * 1e3
        assert row["share_of_copy_bandwidth"] == pytest.approx(rate / measured["copy_bytes_per_second"])
    # q, k, v and o, three matrices of the feed-forward network and two norms a layer; the last norm and the head.
    weights = 4 * (256 * 256 * 2 + 2 * 128 * 256 + 3 * 256 * 704 + 2 * 256) + 256 + 512 * 256
    kept = 4 * 2 * 2 * 64  # elements of the keys and values of a token
    assert [row["bytes"] for row in cases] == [2 * (weights + kept * batch * (20 + 2)) for batch in (1, 3)]


def test_transformers_has_no_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*COMMON, "--peer", "--quantize", "int8"])
    assert "--quantize: transformers, which --peer times, has no codes" in capsys.readouterr().err


def test_the_bytes_of_matrices_in_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """A byte for each weight of a layer's matrices, and a scale of four for each 128 inputs of an output."""
    _, ready, *cases = rows_of(capsys, "--quantize", "int8", "--no-graphs")
    assert (ready["quantize"], ready["graphs"]) == ("int8", False)
    matrices = [(256, 256), (128, 256), (128, 256), (256, 256), (704, 256), (704, 256), (256, 704)]
    codes = 4 * sum(outputs * inputs + 4 * outputs * -(-inputs // 128) for outputs, inputs in matrices)
    plain = 2 * (4 * 2 * 256 + 256 + 512 * 256)
    kept = 2 * 4 * 2 * 2 * 64
    assert [row["bytes"] for row in cases] == [codes + plain + kept * batch * 22 for batch in (1, 3)]


def test_a_case_that_does_not_fit_is_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode.Orca, "holds", lambda self, case: case.batch < 3)
    _, about, first, second = rows_of(capsys)
    about.pop("ready_seconds")
    assert "milliseconds" in first
    assert second == about | {"batch": 3, "context": 20, "left_out": "its keys and values do not fit"}


def test_a_model_of_the_table_is_written_once_and_a_folder_is_taken(tmp_path: Path) -> None:
    assert write_model("llama-8b", tmp_path / "made") == tmp_path / "made"
    assert json.loads((tmp_path / "made/config.json").read_text()) == MODELS["llama-8b"] | {"orca_random_weights": 0}
    assert write_model(str(tmp_path / "made"), tmp_path / "none") == tmp_path / "made"
    assert not (tmp_path / "none").exists()


def test_rates_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cuda_kernels, decode):
        monkeypatch.setattr(module, "seconds", lambda run, device: 0.5)
    assert cuda_kernels.copy_bandwidth(CPU) == 2 * 2**20 / 0.5
    assert decode.product_rate(CPU) == 2 * 128**3 / 0.5


def test_the_work_of_a_layers_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them runs."""
    drawn = list[Any]()
    monkeypatch.setattr(cuda_kernels, "sample", lambda logits, draws: drawn.append(draws))
    layer = Layer(gpt(4, 48, 4, positions=64, vocab_size=101), torch.float16, CPU)
    sides = {"qkv": (48, 144), "projection": (48, 48), "up": (48, 192), "down": (192, 48)}
    found = [*layer.elementwise(3), *layer.products(3), *layer.sampling(5)]
    coded = 48 * 128 + 48 * 4  # of each output a byte for a whole group of inputs, and a scale of four
    assert {(one.kernel, one.case): one.work for one in found} == {
        ("add_norm", "3 tokens"): Work(4 * 3 * 48 * 2, 0),
        ("bias_act", "3 tokens"): Work(2 * 3 * 192 * 2, 0),
        **{
            (f"matmul {name}", "3 tokens"): Work((ins * outs + 3 * (ins + outs)) * 2, 2 * 3 * ins * outs)
            for name, (ins, outs) in sides.items()
        },
        ("int8 projection", "3 tokens"): Work(coded + 3 * (48 + 48) * 2, 2 * 3 * 48 * 48),
        **{(name, "5 rows"): Work(5 * 101 * 2, 0) for name in ("greedy", "sample", "sample, top-k and top-p")},
    }
    for one in found:
        if one.kernel.startswith("sample"):
            one.run()
    assert [(draws.top_k.tolist(), draws.top_p.tolist()) for draws in drawn] == [
        ([0] * 5, [0.0] * 5),
        ([50] * 5, [0.9] * 5),
    ]
