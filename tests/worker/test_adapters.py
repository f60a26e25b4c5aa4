"""Adapters: engines make the tokens of transformers' models into which each adapter was merged by plain torch."""

import json
import random
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_shape
from lora import Lora, load, make_lora
from properties import covering
from safetensors.torch import load_file, save_file
from worker.driver import Sampled, TinyEngine, make_stage
from worker.engines import in_process
from worker.test_quantize import CUTS, Oracle, check_tokens, make, requests_for

from orca_common.adapters import Adapter, check_names, read_adapters
from orca_common.bounded_file import open_regular
from orca_common.checkpoint import read_checkpoint
from orca_common.errors import FailedPrecondition
from orca_kernels.cpu.library import instruction_sets
from orca_kernels.cpu.program import PANEL, Program, low_rank
from orca_worker.iteration.model import Adaptable, Compute
from orca_worker.models.adapters import AdapterFile, fingerprint, read_adapter
from orca_worker.models.families import check_partition, topology
from orca_worker.models.low_rank import LowRank, LowRanks
from orca_worker.models.recording import Matrix
from orca_worker.models.weight_files import fingerprint as of_weights
from orca_worker.partition import Types
from orca_worker.stage.adapters import Held, Wanted
from orca_worker.stage.stage import Stage, WeightsChanged

FAMILIES = ("gpt2", "llama, 2 K/V heads", "gemma3, windows but in one layer", "neox", "gptj", "t5", "marian")


def make_loras(folder: Path, base: Path) -> list[Lora]:
    """Three unlike ones: of all modules, of few with a rank of two panels, of one with patterns."""
    every = make_lora(folder / "every", base, "every", seed=1)
    layers = sorted({name.rpartition(".")[2] for name in every.changes})
    return [
        every,
        make_lora(folder / "wide", base, "wide", seed=2, rank=19, targets=layers[::2], use_rslora=True),
        make_lora(
            folder / "odd", base, "odd", seed=3, rank=1, ranks={layers[-1]: 3}, alphas={layers[-1]: 2}, alpha=5, size=1
        ),
    ]


def requests_of(loras: Sequence[Lora | None], vocabulary: int, seed: int = 5) -> list[Sampled]:
    """One request of each; None: of the model alone."""
    requests = requests_for(vocabulary, len(loras), seed)
    for request, lora in zip(requests, loras, strict=True):
        request.sampling = {} if lora is None else {"adapter": lora.adapter.name}
    return requests


def check(base: Path, requests: Sequence[Sampled], loras: Sequence[Lora | None]) -> None:
    """Each token against the merged model's after those before it."""
    models: dict[Path | None, Any] = {}
    for request, lora in zip(requests, loras, strict=True):
        folder = None if lora is None else lora.adapter.folder
        if folder not in models:
            models[folder] = load(base) if lora is None else lora.merged(base)
        assert request.made == expected(models[folder], request), folder


@torch.inference_mode()
def expected(model: Any, request: Sampled) -> list[int]:
    """The likeliest tokens after those that were made before them."""
    prompt, made = request.prompt, request.made[:-1]
    if model.config.is_encoder_decoder:
        start = model.config.decoder_start_token_id
        of = model(torch.tensor([prompt]), decoder_input_ids=torch.tensor([[start, *made]]), use_cache=False)
        logits = of.logits[0]
    else:
        logits = model(torch.tensor([[*prompt, *made]]), use_cache=False).logits[0, len(prompt) - 1 :]
    if model.config.model_type == "marian":
        logits[:, model.config.pad_token_id] = -torch.inf
    return logits.argmax(1).tolist()


@pytest.mark.parametrize("shape", FAMILIES)
def test_tokens_equal_merged_models(tmp_path: Path, shape: str) -> None:
    """By the kernels of this machine and in plain torch; requests of the model itself are among them."""
    base, vocabulary = make(tmp_path / "base", shape)
    loras = make_loras(tmp_path, base)
    of = [*loras, None, *loras[::-1], None, *loras]
    for kernels in ("auto", "torch"):
        stage = make_stage(base, 700, 16, kernels=kernels, adapters=[lora.adapter for lora in loras])
        requests = requests_of(of, vocabulary)
        TinyEngine(stage, 700, 16).run(requests)
        check(base, requests, of)
    made = {tuple(request.made) for request in requests}
    assert len(made) > len(loras), "adapters that change nothing test nothing"


def test_a_part_alone(tmp_path: Path) -> None:
    """No adapter changes what stands behind the queries, or before the keys, in one operation; and so on."""
    base, vocabulary = make(tmp_path / "base", "qwen3, large heads")
    for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        lora = make_lora(tmp_path / part, base, part, seed=1, targets=[part])
        TinyEngine(make_stage(base, 300, 16, adapters=[lora.adapter]), 300, 16).run(
            requests := requests_of([lora, None, lora, lora], vocabulary)
        )
        check(base, requests, [lora, None, lora, lora])


def wanted(lora: Lora, version: int) -> Wanted:
    return Wanted(f"{lora.adapter.name}@{version}", lora.adapter)


def have(stage: Stage, *wanted: Wanted) -> list[Held]:
    """Loads a table, as the controller does."""
    held = {one.id: one for one in stage.adapters.keep(wanted)}
    for one in wanted:
        if one.id not in held:
            files = stage.adapters.read(one)
            held[one.id] = files if isinstance(files, Held) else stage.adapters.load(one, files)
    return [held[one.id] for one in wanted]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("shape", ["gpt2", "llama, 2 K/V heads"])
def test_loaded_and_replaced_while_it_runs(tmp_path: Path, shape: str, kernels: str) -> None:
    """Requests go on with the version that they began with, among those of a new one, in any company."""
    base, vocabulary = make(tmp_path / "base", shape)
    own = make_lora(tmp_path / "own", base, "own", seed=9)
    old, new = (make_lora(tmp_path / f"{n}", base, "a", seed=n, rank=3 + 14 * n) for n in range(2))
    stage = make_stage(base, 700, 16, kernels=kernels, adapters=[own.adapter], adapters_folder=tmp_path)
    engine, requests = TinyEngine(stage, 700, 16), requests_of([old, own, None, old, new, own, new], vocabulary)
    for request, version in zip(requests, "11-1212", strict=True):
        if request.sampling.get("adapter") == "a":
            request.sampling = {"adapter": f"a@{version}"}
    first = have(stage, wanted(old, 1))
    assert [(held.id, held.fingerprint, held.error) for held in first] == [("a@1", fingerprint(old.adapter), "")]
    begun = requests[:4]
    engine.step(begun, [])
    again = have(stage, wanted(old, 1), wanted(new, 2), wanted(own, 3))
    assert [held.error for held in again] == ["", "", ""]
    assert stage.rows.adapters["own@3"] == stage.rows.adapters["own"], "it was there"
    engine.step(requests[4:], begun)
    while live := [request for request in requests if len(request.made) < request.new_tokens]:
        engine.step([], live)
    check(base, requests, [old, own, None, old, new, own, new])

    have(stage, wanted(new, 2))
    assert stage.rows.adapters.keys() == {"own", "a@2"}
    have(stage, wanted(new, 2), wanted(old, 4))
    assert stage.rows.adapters["a@4"] not in (0, stage.rows.adapters["a@2"])
    last = requests_of([None, None], vocabulary)
    last[0].sampling, last[1].sampling = {"adapter": "a@4"}, {"adapter": "a@2"}
    engine.run(last)
    check(base, last, [old, new])


def test_adapters_that_are_not_loaded(tmp_path: Path) -> None:
    """Each is refused with a sentence, and changes nothing."""
    base, vocabulary = make(tmp_path / "base", "llama, 2 K/V heads")
    root = tmp_path / "root"
    root.mkdir()
    outside, good = make_lora(tmp_path / "a", base, "a", seed=1), make_lora(root / "b", base, "b", seed=2)
    other, _ = make(tmp_path / "other", "gpt2")
    wrong = make_lora(root / "c", other, "c", seed=3)
    (root / "link").symlink_to(tmp_path / "a")
    linked = Wanted("d@4", Adapter("d", root / "link"))
    none = Wanted("e@5", Adapter("e", root / "nothing"))
    stage = make_stage(base, 300, 16, adapters_folder=root)
    held = have(stage, wanted(outside, 1), wanted(good, 2), wanted(wrong, 3), linked, none)
    errors = [
        f"adapter a: {tmp_path / 'a'} is not below {root} (adapters_folder)",
        "",
        "adapter c: it is for another model",
        f"adapter d: {root / 'link'} is not below",
        f"adapter e: {root / 'nothing'} holds no adapter_config.json",
    ]
    assert all(one.error.startswith(error) for one, error in zip(held, errors, strict=True)), held
    assert stage.rows.adapters.keys() == {"b@2"}
    requests = requests_of([None, None], vocabulary)
    requests[0].sampling = {"adapter": "b@2"}
    TinyEngine(stage, 300, 16).run(requests)
    check(base, requests, [good, None])
    [refused] = have(make_stage(base, 300, 16), wanted(good, 2))
    assert refused.error == "adapter b: this rank loads none (the setting adapters_folder)"


def test_no_file_outside_of_the_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even for its fingerprint, of which a caller would learn whether it has changed. Links within the folder are
    as the caches of huggingface_hub have them."""
    base = make_shape(tmp_path / "base", "llama, 2 K/V heads")
    (root := tmp_path / "root").mkdir()
    outside, inside = make_lora(tmp_path / "a", base, "a", seed=1), make_lora(root / "b", base, "b", seed=2)
    names, stage = ("adapter_config.json", "adapter_model.safetensors"), make_stage(base, 300, 16, adapters_folder=root)
    opened, real = list[Path](), open_regular

    def seen(path: Path) -> int:
        opened.append(path.resolve())
        return real(path)

    for module in ("orca_worker.models.adapters", "orca_worker.models.header", "orca_common.bounded_file"):
        monkeypatch.setattr(f"{module}.open_regular", seen)
    for each, folder in enumerate((tmp_path / "a", linked(root / "folder", tmp_path / "a"), root / "x" / "../../a")):
        [held] = have(stage, Wanted(f"a@{each}", Adapter("a", folder)))
        assert held.error == f"adapter a: {folder} is not below {root} (adapters_folder)"
    for one in names:
        (folder := root / f"with {one}").mkdir()
        for other in names:
            linked(folder / other, (outside if one == other else inside).adapter.folder / other)
        [held] = have(stage, Wanted("c@9", Adapter("c", folder)))
        assert held.error == f"adapter c: {folder / one} is not below {root} (adapters_folder)"
    assert opened == []
    (good := root / "links").mkdir()
    for one in names:
        linked(good / one, inside.adapter.folder / one)
    [held] = have(stage, Wanted("b@1", Adapter("b", good)))
    assert (held.error, set(opened)) == ("", {inside.adapter.folder / one for one in names})


ODD: dict[str, Callable[[Path], Path]] = {  # of the folder above, the adapter's
    "a link to itself": lambda root: linked(root / "x", "x"),
    "NUL": lambda root: root / "a\0b",
    "a long name": lambda root: root / ("x" * 5000),
    "below a file": lambda root: root / "b" / "adapter_config.json" / "y",
}


def linked(link: Path, to: str | Path) -> Path:
    link.symlink_to(to)
    return link


@pytest.mark.parametrize("case", ODD)
def test_an_odd_folder_stops_no_other(tmp_path: Path, case: str) -> None:
    """Python has other errors than OSError for some."""
    base = make_shape(tmp_path / "base", "llama, 2 K/V heads")
    good = make_lora(tmp_path / "b", base, "b", seed=2)
    stage = make_stage(base, 300, 16, adapters_folder=tmp_path)
    odd, other = have(stage, Wanted("a@1", Adapter("a", ODD[case](tmp_path))), wanted(good, 2))
    assert odd.error.startswith("adapter a: ")
    assert (other.error, stage.rows.adapters.keys()) == ("", {"b@2"})


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_an_adapter_that_cannot_be_loaded_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    """torch has RuntimeError where memory is short."""
    base, vocabulary = make(tmp_path / "base", "llama, 2 K/V heads")
    bad, good = (make_lora(tmp_path / name, base, name, seed=n) for n, name in enumerate("ab"))
    stage, real, left = make_stage(base, 300, 16, kernels=kernels, adapters_folder=tmp_path), LowRanks.of, [5]

    def of(self: LowRanks, file: AdapterFile, matrix: Matrix, first: int = 0) -> list[LowRank]:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("not enough memory: you tried to allocate 1000000 bytes")
        return real(self, file, matrix, first)

    monkeypatch.setattr(LowRanks, "of", of)
    first, second = have(stage, wanted(bad, 1), wanted(good, 2))
    assert (first.error, second.error) == ("adapter a: not enough memory: you tried to allocate 1000000 bytes", "")
    requests = requests_of([None, None], vocabulary)
    requests[0].sampling = {"adapter": "b@2"}
    TinyEngine(stage, 300, 16).run(requests)
    check(base, requests, [good, None])


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_keys_and_values_that_are_still_to_come_are_not_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    """Their memory is taken page by page: until then the machine counts it as free."""
    base, vocabulary = make(tmp_path / "base", "llama, 2 K/V heads")
    lora = make_lora(tmp_path / "a", base, "a", seed=1)
    stage = make_stage(base, 800, 16, kernels=kernels, adapters_folder=tmp_path)
    model = stage._model
    assert model is not None
    assert isinstance(model, Adaptable)
    assert model.kv_shape is not None
    whole, needed = 800 * model.kv_shape.slot_bytes, model.adapter_bytes(read_adapter(lora.adapter, "model."))

    def load(available: int) -> str:
        monkeypatch.setattr("orca_worker.machine.available_bytes", lambda: available)
        return have(stage, wanted(lora, 1))[0].error

    few = whole + 2 * needed - 2
    assert load(few) == f"adapter a: it takes {needed} bytes of memory; {needed - 1} are free"
    TinyEngine(stage, 800, 16).run(requests_of([None], vocabulary))
    assert load(few) == "", "its blocks are not to come any more"
    assert have(stage) == []
    stage.allocate(800, 16)
    assert load(whole - 2).endswith("; 0 are free")
    assert load(whole + 2 * needed) == ""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", ["gpt2", "llama, 2 K/V heads"])
def test_an_adapter_is_counted_as_it_lies_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, dtype: str
) -> None:
    """In the model's type, whatever the file's is. The kernels have A in whole panels: one of rank 1 is much larger."""
    base, _ = make(tmp_path / "base", shape)
    layers = sorted({name.rpartition(".")[2] for name in make_lora(tmp_path / "all", base, "all", seed=1).changes})
    loras = [*make_loras(tmp_path, base), make_lora(tmp_path / "one", base, "one", seed=4, rank=1, targets=layers[1:])]
    packed, real = list[int](), Program.add_adapter

    def add_adapter(self: Program, delta: Any, number: int, parts: Any, columns: int, up: int = 0) -> None:
        a, runs = low_rank(parts, columns, up)
        numbers = -(-len(a) // PANEL) * PANEL * a.shape[1] + sum(run.b.numel() for run in runs)
        packed.append(numbers * self.dtype.itemsize)
        real(self, delta, number, parts, columns, up)

    monkeypatch.setattr(Program, "add_adapter", add_adapter)
    for kernels in ("auto", "torch"):
        model = make_stage(base, 160, 16, dtype, kernels, adapters_folder=tmp_path)._model
        assert isinstance(model, Adaptable)
        for number, lora in enumerate(loras):
            packed.clear()
            model.adapt(number, file := read_adapter(lora.adapter, "model." if "llama" in shape else "transformer."))
            numbers = sum(a.numel() + b.numel() for _, a, b in lora.changes.values())
            taken = sum(packed) or numbers * getattr(torch, dtype).itemsize
            assert taken <= model.adapter_bytes(file) < 1.1 * taken, (kernels, lora.adapter.name)


def test_planning_counts_adapters(tmp_path: Path) -> None:
    base, _ = make(tmp_path / "base", "llama, 2 K/V heads")
    lora = make_lora(tmp_path / "a", base, "a", seed=1)
    numbers = sum(a.numel() + b.numel() for _, a, b in lora.changes.values())

    def planned(adapters: tuple[Adapter, ...], tp: int, pp: int) -> int:
        checkpoint = read_checkpoint(base, None, adapters)
        return sum(share.weight_bytes for share in topology(checkpoint, tp, pp, Types.of("float32")))

    for pp in (1, 2):
        assert planned((lora.adapter,), 1, pp) - planned((), 1, pp) == 4 * numbers
    assert planned((lora.adapter,), 2, 1) > planned((), 2, 1)


@pytest.mark.parametrize("kernels", [*instruction_sets(), "torch"])
def test_each_instruction_set(tmp_path: Path, kernels: str) -> None:
    base, vocabulary = make(tmp_path / "base", "llama, 2 K/V heads")
    loras = make_loras(tmp_path, base)
    of = [*loras, None]
    stage = make_stage(base, 400, 16, kernels=kernels, adapters=[lora.adapter for lora in loras])
    TinyEngine(stage, 400, 16).run(requests := requests_of(of, vocabulary))
    check(base, requests, of)


@pytest.mark.parametrize(("shape", "cut"), covering(("gpt2", "llama, 2 K/V heads", "t5"), CUTS, strength=1), ids=str)
async def test_several_ranks(tmp_path: Path, shape: str, cut: tuple[int, int]) -> None:
    tp, pp = cut
    base, vocabulary = make(tmp_path / "base", shape)
    loras = make_loras(tmp_path, base)
    of, adapters = [*loras, None, *loras], [lora.adapter for lora in loras]
    async with in_process(base, tp, pp, slots=600, adapters=adapters) as (master, _):
        await master.run(requests := requests_of(of, vocabulary))
    check(base, requests, of)


def test_thirty_two_of_sixty_four_in_one_iteration(tmp_path: Path) -> None:
    base, vocabulary = make(tmp_path / "base", "llama, 2 K/V heads")
    loras = [make_lora(tmp_path / f"{n}", base, f"a-{n}", seed=n) for n in range(64)]
    stage = make_stage(base, 32 * 48, 16, adapters=[lora.adapter for lora in loras])
    engine, of = TinyEngine(stage, 32 * 48, 16), loras[::2]
    requests = requests_of(of, vocabulary)
    engine.step(requests, [])
    for _ in range(requests[0].new_tokens - 1):
        engine.step([], requests)
    check(base, requests, of)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_bits_do_not_depend_on_the_batch(tmp_path: Path, dtype: str, quantize: str | None) -> None:
    """A request's logprobs are the same alone and among others, and those of the model itself without adapters."""
    base, vocabulary = make(tmp_path / "base", "llama, 2 K/V heads")
    loras = make_loras(tmp_path, base)
    of, adapters = [*loras, None, *loras, None], [lora.adapter for lora in loras]
    seen = list[list[list[float]]]()
    for max_batch, seed in ((1, 0), (8, 1), (5, 2)):
        stage = make_stage(base, 600, 16, dtype, quantize=quantize, adapters=adapters)
        requests = requests_of(of, vocabulary)
        for request in requests:
            request.sampling["logprobs"] = True
        TinyEngine(stage, 600, 16, seed).run(requests, max_batch)
        seen.append([request.logprobs for request in requests])
    assert seen[0] == seen[1] == seen[2]
    plain = requests_of([None] * len(of), vocabulary)
    for request in plain:
        request.sampling["logprobs"] = True
    TinyEngine(make_stage(base, 600, 16, dtype, quantize=quantize), 600, 16).run(plain)
    assert [seen[0][3], seen[0][7]] == [plain[3].logprobs, plain[7].logprobs]


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_beside_weights_in_codes(tmp_path: Path, quantize: str) -> None:
    """The adapter multiplies the numbers, before they become codes."""
    base, vocabulary = make(tmp_path / "base", "llama, 2 K/V heads")
    lora, oracle = make_lora(tmp_path / "a", base, "a", seed=1), Oracle(base, 1, quantize)
    for name, (scale, a, b) in lora.changes.items():
        module: Any = oracle.model.get_submodule(name)
        module.forward = partial(added, module.forward, scale * b @ a)
    requests = list[Sampled]()
    for kernels in ("auto", "torch"):
        stage = make_stage(base, 700, 16, kernels=kernels, quantize=quantize, adapters=[lora.adapter])
        requests += (new := requests_of([lora] * 12, vocabulary))
        TinyEngine(stage, 700, 16).run(new)
    check_tokens(oracle, requests)


def added(forward: Callable[[torch.Tensor], torch.Tensor], change: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return forward(x) + x @ change.t()


def test_an_adapter_that_is_not_there_ends_its_request_alone(tmp_path: Path) -> None:
    base, vocabulary = make(tmp_path / "base", "gpt2")
    requests = requests_of([None, None], vocabulary)
    requests[1].sampling = {"adapter": "gone"}
    engine = TinyEngine(make_stage(base, 200, 16), 200, 16)
    engine.step(requests, [])
    assert [request.stuck for request in requests] == [False, True]


def test_another_fingerprint_for_each_change(tmp_path: Path) -> None:
    base, _ = make(tmp_path / "base", "gpt2")
    one = make_lora(tmp_path / "a", base, "a", seed=1).adapter
    stage = Stage(read_checkpoint(base, None, (one,)), Types.of("float32"), torch.device("cpu"), 64, Compute(1))
    before = fingerprint(one)
    assert stage.weights == of_weights(base), "an engine of other adapters goes on with requests of the model alone"
    shutil.rmtree(one.folder)
    make_lora(one.folder, base, "a", seed=2)
    assert fingerprint(one) != before
    with pytest.raises(WeightsChanged):
        stage.form(16)


def config(**changed: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        change(found := load_file(path))
        save_file(found, path)

    return apply


def rename(found: dict[str, torch.Tensor]) -> None:
    for name in list(found):
        found[name.replace("layers.1", "layers.9")] = found.pop(name)


Q = "model.layers.0.self_attn.q_proj"
A = f"base_model.model.{Q}.lora_A.weight"
B = A.replace("lora_A", "lora_B")
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no configuration": (lambda folder: (folder / "adapter_config.json").unlink(), "holds no adapter_config.json"),
    "no weights": (
        lambda folder: (folder / "adapter_model.safetensors").unlink(),
        "holds no adapter_model.safetensors",
    ),
    "cut short": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"12345678"),
        "cannot be read .adapter_model.safetensors: ",
    ),
    "no JSON": (lambda folder: (folder / "adapter_config.json").write_text("{"), "adapter_config.json"),
    "another type": (config(peft_type="IA3"), "says peft_type 'IA3'; Orca has LORA"),
    "DoRA": (config(use_dora=True), "it has DoRA, which Orca does not have"),
    "biases": (config(lora_bias=True), "it has biases of its own .lora_bias."),
    "biases of the model": (config(bias="all"), "it has biases of the model"),
    "modules": (config(modules_to_save=["lm_head"]), "it has whole modules of its own .modules_to_save."),
    "a new way": (config(use_something=1), "it has use_something, which Orca does not have"),
    "PiSSA": (config(init_lora_weights="pissa"), "init_lora_weights 'pissa', which changes the model's own weights"),
    "rank 0": (config(r=0), "r is 0, not a rank from 1 to 256"),
    "rank 257": (config(r=257), "r is 257, not a rank from 1 to 256"),
    "no alpha": (config(lora_alpha="8"), "lora_alpha is '8', not a number"),
    "huge alpha": (config(lora_alpha=10**400), "lora_alpha is .*, not a number up to 1048576"),
    "endless alpha": (config(lora_alpha=float("inf")), "adapter_config.json"),
    "a pattern": (config(rank_pattern={"(a+)+$": 4}), "rank_pattern must be by the names of modules"),
    "another rank": (config(r=5), "has A .4, 70. and B .48, 4.; adapter_config.json says rank 5"),
    "DoRA's tensor": (
        tensors(lambda all: all.update({f"base_model.model.{Q}.lora_magnitude_vector": torch.ones(48)})),
        "is no matrix of a LoRA",
    ),
    "half a head": (
        tensors(lambda all: all.update({A.replace(Q, "lm_head"): torch.ones(4, 48)})),
        "'lm_head' has lora_A alone",
    ),
    "a head": (
        tensors(lambda all: all.update({one.replace(Q, "lm_head"): torch.ones(4, 4) for one in (A, B)})),
        "for another model: 'lm_head' is no linear operation of the model's layers; those are named down_proj, gate",
    ),
    "A alone": (tensors(lambda all: all.pop(B)), f"'{Q}' has lora_A alone"),
    "integers": (tensors(lambda all: all.update({A: torch.ones(4, 48, dtype=torch.int32)})), "is no matrix of a LoRA"),
    "a module twice": (
        tensors(lambda all: all.update({one.replace("model.layers", "layers"): all[one] + 1 for one in (A, B)})),
        f"'{Q}' and '{Q.removeprefix('model.')}' are one module",
    ),
    "no tensors": (tensors(dict.clear), "holds no matrices"),
    "more layers": (
        tensors(rename),
        "for another model: 'layers.9.*' is no linear operation of the model's layers",
    ),
    "another width": (
        tensors(lambda all: all.update({A: torch.ones(4, 64)})),
        "it is for another model: 'layers.0.self_attn.q_proj' is .48, 64., the model's is .48, 48.",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(tmp_path: Path, case: str) -> None:
    base = make_shape(tmp_path / "base", "llama, 2 K/V heads")
    adapter = make_lora(tmp_path / "a", base, "mine", seed=1).adapter
    checkpoint = read_checkpoint(base, None, (adapter,))
    check_partition(checkpoint, 2, 2)
    change, problem = WRONG[case]
    change(adapter.folder)
    with pytest.raises(FailedPrecondition, match=f"^adapter mine: .*{problem}"):
        check_partition(checkpoint, 2, 2)


def test_files_of_strangers(tmp_path: Path) -> None:
    """Whatever stands in them, there is an adapter, or a sentence that names it."""
    base, chance, sentences = make_shape(tmp_path / "base", "llama, 2 K/V heads"), random.Random(1), list[str]()
    adapter = make_lora(tmp_path / "a", base, "mine", seed=1, targets=["q_proj"]).adapter
    said = json.loads((adapter.folder / "adapter_config.json").read_text())
    odd = [
        None,
        0,
        -1,
        2,
        3.5,
        10**400,
        "x",
        [],
        [1],
        {},
        {"q_proj": 2},
        {"q_proj": []},
        {"q_proj": 1e308},
        True,
        "none",
    ]
    weights = (adapter.folder / "adapter_model.safetensors").read_bytes()
    for _ in range(2000):
        fields = said | {
            chance.choice([*said, "use_dora", "new"]): chance.choice(odd) for _ in range(chance.randint(0, 2))
        }
        (adapter.folder / "adapter_config.json").write_bytes(broken(json.dumps(fields).encode(), chance))
        (adapter.folder / "adapter_model.safetensors").write_bytes(broken(weights, chance))
        try:
            read_adapter(adapter, "model.")
        except FailedPrecondition as error:
            sentences.append(str(error))
    assert 1000 < len(sentences) < 2000
    assert all(sentence.startswith("adapter mine: ") for sentence in sentences)


def broken(raw: bytes, chance: random.Random) -> bytes:
    """Now and then another byte, or an earlier end; bytes are changed where a header is."""
    changed = bytearray(raw)
    for _ in range(chance.choice([0, 0, 0, 0, 1, 3])):
        changed[chance.randrange(min(len(changed), 700))] = chance.randrange(256)
    return bytes(changed[: chance.randrange(len(changed))] if chance.random() < 0.1 else changed)


def test_a_pattern_for_each_of_many_modules(tmp_path: Path) -> None:
    """Files within their bounds had 80,000 of both, which were all compared: minutes in each process. The first key
    counts that fits."""
    count, header, at = 24_000, dict[str, object](), 0
    for number in range(count):
        for matrix in "AB":
            name = f"base_model.model.{number}.x.lora_{matrix}.weight"
            header[name] = {"dtype": "F32", "shape": [1, 1], "data_offsets": [at, at + 4]}
            at += 4
    raw = json.dumps(header).encode()
    (tmp_path / "adapter_model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(at))
    alphas = {**{f"{n}.x": n for n in range(1, count - 2)}, "x": 9, f"{count - 2}.x": 8, f"{count - 1}.x": 8}
    said = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "alpha_pattern": alphas}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**said, "rank_pattern": {"x": 1}}))
    started = time.process_time()
    found = read_adapter(Adapter("mine", tmp_path), "").changes
    assert time.process_time() - started < 20
    assert [found[f"{n}.x.weight"].scale for n in range(count)] == [9, *range(1, count - 2), 9, 9]


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("a", "'a' is not NAME=FOLDER"),
        ("a=", "'a=' is not NAME=FOLDER"),
        ("=a", "'=a' is not NAME=FOLDER"),
        ("a=/x,b=/y,a=/z", "two have the name 'a'"),
        ("a" * 257 + "=/x", "is no name of at most 256 printable characters"),
        (",".join(f"a{n}=/x" for n in range(1025)), "1025 of them; at most 1024 are served"),
    ],
    ids=lambda said: said[:8],
)
def test_settings_that_are_refused(said: str, problem: str) -> None:
    with pytest.raises(FailedPrecondition, match=f"^adapters: .*{problem}"):
        read_adapters(said)


def test_settings() -> None:
    found = read_adapters(" a=/x , b=c/d=e,")
    assert found == (Adapter("a", Path("/x")), Adapter("b", Path("c/d=e")))
    check_names(found, "model")
    with pytest.raises(FailedPrecondition, match="'a' is the name of the model itself"):
        check_names(found, "a")
    with pytest.raises(FailedPrecondition, match="'b' is the name of another release's model"):
        check_names(found, "model", ("c", "b"))
