"""Times the decode iterations of a whole model on one GPU, against the bandwidth of the memory that it reads.

    python -m orca_lab.decode --model llama-7b --batch 1 8 32 64 --context 512 2048
    python -m orca_lab.decode --model llama-7b --quantize int4
    python -m orca_lab.decode --model llama-7b --peer               transformers' static cache in one CUDA graph

The model has random weights, made on the device. `--model` is one of MODELS, a name of the paper's Table 1, or a folder
with a config.json that has `orca_random_weights`. It runs in the `Stage` that serves, with real control messages.

Each result is printed as a line of JSON as soon as it is there. Before them a line has the bandwidth of a copy and the
rate of a bfloat16 product, measured in the same process.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from orca_common.checkpoint import Checkpoint, read_checkpoint, resolve_model
from orca_worker.iteration.model import Compute
from orca_worker.models.families import family_of
from orca_worker.models.formats.table import FORMATS
from orca_worker.models.recorded import RecordedFamily
from orca_worker.partition import ITEM_BYTES, SINGLE, Types
from orca_worker.rank.app import open_device
from orca_worker.stage.stage import Stage

from .cuda_kernels import copy_bandwidth, seconds
from .roofline import Work, work
from .shards import BLOCK_SIZE, INCREMENT, INITIATION, Case, measure, synchronize

LLAMA = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {  # config.json; the sizes are those of the published models
    "llama-7b": LLAMA
    | {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096},
    "llama-8b": LLAMA
    | {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 500000.0},
    "llama-small": LLAMA  # for a CPU, and for the first minute on a GPU
    | {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096},
}
SIDE = 8192  # of the square matrices whose product is timed
KEPT_FREE = 4 << 30  # bytes of the device beside weights, keys and values

Measured = tuple[list[float], list[float]]  # seconds of each repetition in ascending order, and the host's part of them


def write_model(name: str, folder: Path) -> Path:
    """Returns the folder of a model with random weights; one of MODELS is written to `folder` first."""
    if name not in MODELS:
        return resolve_model(name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[name] | {"orca_random_weights": 0}))
    return folder


def product_rate(device: torch.device) -> float:
    """FLOP per second of a bfloat16 product of random square matrices."""
    side = SIDE if device.type == "cuda" else 128
    x, y = torch.randn((2, side, side), device=device).to(torch.bfloat16)
    return 2 * side**3 / seconds(lambda: x @ y, device)


class Orca:
    """Decode iterations in the stage that serves."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: str, device: torch.device, cases: Sequence[Case], compute: Compute
    ) -> None:
        """Raises SystemExit where not even the smallest case fits into the memory."""
        self._vocab, self._device = checkpoint.vocab_size, device
        self.stage = Stage(checkpoint, Types.of(dtype), device, max(case.slots for case in cases), compute)
        self.slots = self.stage.form(BLOCK_SIZE).slots
        if self.slots < min(case.slots for case in cases):
            raise SystemExit(f"the memory holds {self.slots} slots, and the smallest case needs more")
        self.stage.allocate(self.slots, BLOCK_SIZE)

    def measure(self, case: Case, repetitions: int) -> Measured:
        """Prompts are initiated once, so that keys and values are those of a model; then the increments are timed."""
        self.stage.run(Case(INITIATION, case.batch, case.prompt).message(self._vocab))
        return measure(self.stage, case.message(self._vocab), self._device, repetitions)

    def holds(self, case: Case) -> bool:
        return case.slots <= self.slots


class Peer:
    """transformers' own model with its static cache: one decode step is captured in a CUDA graph and replayed.

    The step is greedy, as Orca's, and reads the whole cache, which is as long as the context needs."""

    def __init__(self, folder: Path, dtype: str, device: torch.device) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self._device = device
        config = AutoConfig.from_pretrained(folder)
        with torch.device(device):
            self._model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()

    def holds(self, case: Case) -> bool:
        """Whether keys and values fit into what is free of the device."""
        if self._device.type != "cuda":
            return True
        config = self._model.config
        head = config.hidden_size // config.num_attention_heads
        each = 2 * config.num_hidden_layers * config.num_key_value_heads * head * self._model.dtype.itemsize
        return case.slots * each + KEPT_FREE < torch.cuda.mem_get_info(self._device)[0]

    @torch.inference_mode()
    def measure(self, case: Case, repetitions: int) -> Measured:
        from transformers import StaticCache

        cache = StaticCache(config=self._model.config, max_cache_len=case.prompt + 1)
        vocab = self._model.config.vocab_size
        token = torch.randint(vocab, (case.batch, 1), device=self._device)
        self._model(token, past_key_values=cache, use_cache=True)  # makes the cache's tensors
        made: Any = cache  # its tensors may be missing, by its types
        for layer in made.layers:
            layer.keys.normal_()
            layer.values.normal_()
        at = torch.full((1,), case.prompt, device=self._device)

        def step() -> torch.Tensor:
            places = {"cache_position": at, "position_ids": at[None]}
            logits = self._model(token, past_key_values=cache, use_cache=True, **places).logits
            return logits[:, -1].argmax(-1)

        return self._timed(self._replayed(step), repetitions)

    def _replayed(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        if self._device.type != "cuda":
            return step
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay

    def _timed(self, step: Callable[[], torch.Tensor], repetitions: int) -> Measured:
        took, host = [], []
        for _ in range(repetitions):
            synchronize(self._device)
            began = time.perf_counter()
            tokens = step()
            launched = time.perf_counter() - began
            tokens.tolist()
            took.append(time.perf_counter() - began)
            host.append(launched)
        return sorted(took), sorted(host)


def work_of(checkpoint: Checkpoint, dtype: str, case: Case) -> Work:
    family = family_of(checkpoint)
    assert isinstance(family, RecordedFamily)
    of_matrix = FORMATS[checkpoint.quantize].bytes
    return work(family.record(family.read(checkpoint), SINGLE), ITEM_BYTES[dtype], case.requests, of_matrix)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-7b", help=f"one of {', '.join(MODELS)}, of Table 1, or a folder")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[512, 2048], help="tokens before the timed one")
    parser.add_argument("--dtype", choices=ITEM_BYTES, default="bfloat16")
    parser.add_argument("--quantize", choices=[*filter(None, FORMATS)], help="the format of layers' matrices")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel by itself")
    parser.add_argument("--peer", action="store_true", help="time transformers instead")
    given = parser.parse_args(arguments)
    if given.peer and given.quantize:
        parser.error("--quantize: transformers, which --peer times, has no codes")
    device = open_device(given.device, 0)
    torch.manual_seed(0)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    about = {"model": given.model, "dtype": given.dtype, "engine": "transformers" if given.peer else "orca"}
    with tempfile.TemporaryDirectory(prefix="orca-decode-") as temporary:
        folder = write_model(given.model, Path(temporary) / given.model)
        checkpoint = read_checkpoint(folder, given.quantize)
        copy, rate = copy_bandwidth(device), product_rate(device)
        print(json.dumps({"device": name, "copy_bytes_per_second": copy, "product_flop_per_second": rate}), flush=True)
        cases = [Case(INCREMENT, batch, context) for context in given.context for batch in given.batch]
        began = time.perf_counter()
        if given.peer:
            engine = Peer(folder, given.dtype, device)
        else:
            engine = Orca(checkpoint, given.dtype, device, cases, Compute(graphs=not given.no_graphs))
            about |= {"graphs": not given.no_graphs, "quantize": given.quantize}
        print(json.dumps(about | {"ready_seconds": time.perf_counter() - began}), flush=True)
        for case in cases:
            row: dict[str, Any] = about | {"batch": case.batch, "context": case.prompt}
            if engine.holds(case):
                took, host = engine.measure(case, given.repetitions)
                median, moved = statistics.median(took), work_of(checkpoint, given.dtype, case).bytes
                row |= {"milliseconds": median * 1e3, "fastest": took[0] * 1e3, "slowest": took[-1] * 1e3}
                row |= {"host_milliseconds": statistics.median(host) * 1e3, "bytes": moved}
                row |= {"share_of_copy_bandwidth": moved / median / copy}
            else:
                row |= {"left_out": "its keys and values do not fit"}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
