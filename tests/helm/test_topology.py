"""The chart, the scheduler and `orca topology --values` agree on which pod holds which ranks.

rank_map.txt has one line for each worker pod: its ordinal, its engine, and its ranks as STAGE.TENSOR_RANK. After a
change that is meant, run this file with UPDATE_RANK_MAP=1 and read the difference.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm.chart import DEMO, FOLDER, SHAPES, merged, render
from helm_python import HelmRenderError
from properties import PART
from typer.testing import CliRunner

from orca_cli.chart_values import MOVED, VALUES, EngineValues, read_values
from orca_cli.main import app
from orca_cli.topology import pods_of
from orca_common.settings import KNOWN, variable
from orca_scheduler.settings import SchedulerSettings
from orca_worker.settings import SupervisorSettings

GOLDEN = Path(__file__).with_name("rank_map.txt")
# A model that can be cut into each of these shapes.
WIDE = {"model_type": "gpt2", "vocab_size": 64, "n_positions": 32, "n_embd": 64, "n_head": 8, "n_layer": 4}


def title(shape: dict[str, int]) -> str:
    return " ".join(f"{name} {value}" for name, value in shape.items())


def as_rendered(shape: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The map, from what the rendered pods are told and how many there are."""
    release = render(merged(DEMO, {"engine": shape}))
    loaded: dict[str, Any] = {}
    for service, kind in (("scheduler", SchedulerSettings), ("worker", SupervisorSettings)):
        for name in KNOWN:
            monkeypatch.delenv(variable(name), raising=False)
        for name, value in release.environment(service).items():
            monkeypatch.setenv(name, value)
        loaded[service] = kind.load([])
    of_engine = loaded["scheduler"].shape
    assert loaded["worker"].ranks == of_engine.ranks_per_pod
    lines = []
    for ordinal in range(release.workloads["worker"]["spec"]["replicas"]):
        engine, pod = divmod(ordinal, of_engine.pods)
        ranks = [f"{place.stage}.{place.tensor_rank}" for place in of_engine.places() if place.pod == pod]
        lines.append(f"  {ordinal} engine-{engine} {' '.join(ranks)}")
    return lines


def as_computed(shape: dict[str, int], folder: Path) -> list[str]:
    """The map, from what `orca topology --values` reads."""
    release = read_values([values_of(shape, folder)])
    return [
        f"  {pod.ordinal} {pod.engine} {' '.join(f'{place.stage}.{place.tensor_rank}' for place in pod.places)}"
        for pod in pods_of(release.shape(), release.engines)
    ]


def span(told: str) -> range:
    first, _, last = told.partition(" to ")
    return range(int(first), int(last or first) + 1)


def as_shown(shape: dict[str, int], folder: Path) -> list[str]:
    """The map, from the table of pods that `orca topology --values` shows."""
    (folder / "config.json").write_text(json.dumps(WIDE))
    code, shown = topology(values_of(shape, folder), options=("--model", str(folder)))
    assert code == 0, shown
    lines = []
    for line in shown.splitlines():
        if line.startswith("│ orca-worker-"):
            pod, engine, stage, tensor_ranks, numbers = (cell.strip() for cell in line.strip("│").split("│"))
            ranks = [f"{stage}.{rank}" for rank in span(tensor_ranks)]
            assert ranks == [f"{number // shape['tp']}.{number % shape['tp']}" for number in span(numbers)]
            lines.append(f"  {pod.removeprefix('orca-worker-')} {engine} {' '.join(ranks)}")
    return lines


def values_of(shape: dict[str, int], folder: Path) -> Path:
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump({"engine": shape}))
    return file


def golden() -> dict[str, list[str]]:
    """The maps of SHAPES: the whole file in `make fuzz`, which makes it, too (UPDATE_RANK_MAP=1 EXAMPLES=all)."""
    maps: dict[str, list[str]] = {}
    for line in GOLDEN.read_text().splitlines():
        if line.startswith("  "):
            maps[list(maps)[-1]].append(line)
        else:
            maps[line] = []
    return maps if PART == 1 else {title(shape): maps[title(shape)] for shape in SHAPES}


def test_the_map_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = {title(shape): as_rendered(shape, monkeypatch) for shape in SHAPES}
    if os.environ.get("UPDATE_RANK_MAP"):
        assert PART == 1, "a part of the shapes would replace the map: EXAMPLES=all is missing"
        GOLDEN.write_text("".join(f"{line}\n" for name, lines in maps.items() for line in (name, *lines)))
    assert maps == golden()


def test_the_command_computes_the_same_map(tmp_path: Path) -> None:
    assert {title(shape): as_computed(shape, tmp_path) for shape in SHAPES} == golden()


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[-5], SHAPES[-2]], ids=title)
def test_the_command_shows_the_same_map(shape: dict[str, int], tmp_path: Path) -> None:
    assert as_shown(shape, tmp_path) == golden()[title(shape)]


def test_values_that_are_not_given_are_those_of_the_chart() -> None:
    """The chart's own file, so read, says what the command takes without it."""
    assert read_values([FOLDER / "values.yaml"]) == EngineValues()


def topology(*files: Path, options: tuple[str, ...] = ()) -> tuple[int, str]:
    arguments = [argument for file in files for argument in ("--values", str(file))]
    shown = CliRunner().invoke(app, ["topology", *arguments, *options])
    return shown.exit_code, shown.output.strip()


def test_the_values_of_the_demo() -> None:
    code, shown = topology(FOLDER / "values-cpu.yaml")
    assert code == 0
    assert "demo_model, tp 2 x pp 2, float32" in shown
    assert "2 worker pods of 2 ranks" in shown


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"engine": {"tp": 4, "gpusPerPod": 3}}, "engine.gpusPerPod: 3 is no divisor of tp, 4"),
        (
            {"engine": {"tp": 8, "gpusPerNode": 4}},
            "engine.gpusPerPod: a pod of 8 ranks fits on no node, which has 4 GPUs (gpusPerNode)",
        ),
        ({"engine": {"tp": 4}}, "tp 4: 6 heads cannot be shared evenly by 4 tensor ranks"),
        ({"engine": {"pp": 5}}, "pp 5: 4 layers are too few for 5 stages"),
        (
            {"model": {"path": None}},
            "model: exactly one of path, claim, download, image and hub says where the checkpoint is; none is given",
        ),
        (
            {"model": {"hub": {"name": "a/b"}}},
            "model: exactly one of path, claim, download, image and hub says where the checkpoint is; "
            "path and hub are given",
        ),
        (
            {"model": {"path": None, "claim": {"name": "a"}}},
            "model: the checkpoint of model.claim is not on this machine; --model names a copy of it",
        ),
        ({"engine": {"tp": 0}}, "engine.tp: a whole number of at least 1 is needed, it is 0"),
    ],
)
def test_the_command_refuses_what_the_chart_refuses(values: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    """With the same sentence. The chart knows heads and layers only if it is told, the command reads them."""
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    assert topology(FOLDER / "values-cpu.yaml", file) == (1, sentence)


def test_files_that_are_none(tmp_path: Path) -> None:
    absent, broken, text = (tmp_path / name for name in ("absent.yaml", "broken.yaml", "text.yaml"))
    broken.write_text("engine: [")
    text.write_text("engine")
    for file, complaint in (
        (absent, "cannot be read (No such file or directory)"),
        (broken, "cannot be read as YAML"),
        (text, "no map"),
    ):
        code, shown = topology(file)
        assert code == 1
        assert complaint in shown
        assert "Traceback" not in shown


def test_a_value_that_the_chart_does_not_have(tmp_path: Path) -> None:
    """helm refuses it; the table looked right."""
    assert set(json.loads((FOLDER / "values.schema.json").read_text())["properties"]) == VALUES | MOVED.keys()
    file = tmp_path / "values.yaml"
    file.write_text("tpp: 3")
    assert topology(FOLDER / "values-cpu.yaml", file) == (1, f"--values: {file}: tpp: the chart has no such value")


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_refused_with_the_new_one(old: str, tmp_path: Path) -> None:
    """By the command and by the chart. A null, which forgets it in an upgrade, is taken."""
    sentence = f"{old}: named engine.{MOVED[old]} now"
    file = tmp_path / "values.yaml"
    file.write_text(f"{old}: 1")
    assert topology(FOLDER / "values-cpu.yaml", file) == (1, f"--values: {file}: {sentence}")
    with pytest.raises(HelmRenderError) as refused:
        render(merged(DEMO, {old: 1}))
    assert str(refused.value).rstrip('"').endswith(sentence)
    assert render(merged(DEMO, {old: None})).objects == render(DEMO).objects


def test_options_come_before_files() -> None:
    options = ("--tp", "1", "--dtype", "bfloat16", "--quantize", "int8", "--kv-dtype", "int8")
    code, shown = topology(FOLDER / "values-cpu.yaml", options=options)
    assert code == 0
    assert "demo_model, tp 1 x pp 2, int8 and bfloat16, keys and values in int8" in shown
    assert "2 worker pods of 1 ranks" in shown
