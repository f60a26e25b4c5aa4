"""The cost of LoRA adapters: increments of the model alone, of one adapter, and of an adapter for each row, in turn.

    python -m orca_bench.adapters [--rows 32] [--rank 16] [--threads 1] [--turns 15] [--hidden 2048] [--layers 3]
    python -m orca_bench.adapters --layers 22 --vocabulary 32000        the whole of TinyLlama, with its head

The model is a slice of TinyLlama's shape with random weights, and each adapter changes all seven matrices of a layer. A
line of JSON for each: the least and the median of the turns in ms, of an iteration and of the processor time of the
thread that calls, which is all of it with one thread; the bytes of the model's layers and head, and of what its rows'
adapters add; and the throughput as a part of the model's, by processor time with one thread, otherwise by the clock.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from orca.v1 import worker_pb2
from orca.v1.sampling_pb2 import SamplingParams
from orca_common.adapters import Adapter
from orca_common.checkpoint import read_checkpoint
from orca_scheduler.ranks.members import increment, initiation, put_members
from orca_worker.iteration.model import Compute
from orca_worker.partition import Types
from orca_worker.stage.stage import Stage

from .machine import isa
from .schedule import BLOCK_SIZE

PROMPT = 32  # tokens of each request
WARM_UP = 2  # turns
ITEM = 2  # bytes of a number in bfloat16
HEAD = 64  # elements; eight heads share keys and values


def matrices(hidden: int) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a layer's matrices."""
    inner, kv = hidden * 11 // 4, hidden // 8
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def make_model(folder: Path, hidden: int, layers: int, vocabulary: int) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD,
        "num_key_value_heads": hidden // HEAD // 8,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "orca_random_weights": 7,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))


def make_adapter(folder: Path, hidden: int, layers: int, rank: int, seed: int) -> None:
    draw, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for layer in range(layers):
        for name, (outputs, inputs) in matrices(hidden).items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            for letter, size in (("A", (rank, inputs)), ("B", (outputs, rank))):
                numbers = torch.randn(size, generator=draw) * 0.02
                tensors[f"{module}.lora_{letter}.weight"] = numbers.bfloat16()
    targets = [name.partition(".")[2] for name in matrices(hidden)]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": True}))
    save_file(tensors, folder / "adapter_model.safetensors")


class Rows:
    """A stage with three sets of requests, one for each way."""

    def __init__(self, model: Path, adapters: Sequence[Adapter], rows: int, threads: int) -> None:
        names = [one.name for one in adapters]
        self.ways: dict[str, list[str | None]] = {
            "alone": [None] * rows,
            "one adapter": [names[0]] * rows,
            "each row its own": [*names],
        }
        self._rows, self._number, blocks = rows, 0, -(-(PROMPT + 1) // BLOCK_SIZE)
        slots = len(self.ways) * rows * blocks * BLOCK_SIZE
        checkpoint = read_checkpoint(model, None, tuple(adapters))
        self._stage = Stage(checkpoint, Types.of("bfloat16"), torch.device("cpu"), slots, Compute(threads, "auto"))
        self._stage.form(BLOCK_SIZE)
        self._stage.allocate(slots, BLOCK_SIZE)
        for first, adapters_of in zip(range(0, slots, rows), self.ways.values(), strict=False):
            message, members = self._message(), list[Any]()
            for row, name in enumerate(adapters_of, first):
                sampling = None if name is None else SamplingParams(adapter=name)
                tokens = [(7 * row + n) % checkpoint.vocab_size for n in range(PROMPT)]
                message.admissions.add(row=row, claim=row + 1, token_ids=tokens, sampling=sampling)
                members.append(initiation(row, PROMPT, range(row * blocks, (row + 1) * blocks)))
            put_members(message, members)
            self._stage.run(message)

    def _message(self) -> worker_pb2.Iteration:
        self._number += 1
        return worker_pb2.Iteration(number=self._number)

    def increment(self, way: int) -> tuple[float, float]:
        """Runs one. Returns its ms, and those of this thread's processor time."""
        message, first = self._message(), way * self._rows
        put_members(message, [increment(row, PROMPT, 5) for row in range(first, first + self._rows)])
        began, ran = time.perf_counter(), time.thread_time()
        self._stage.run(message)
        return (time.perf_counter() - began) * 1e3, (time.thread_time() - ran) * 1e3


def lines(
    rows: int, rank: int, threads: int, turns: int, hidden: int, layers: int, vocabulary: int = 600
) -> Iterator[dict[str, Any]]:
    """Runs the three ways in turn."""
    each = matrices(hidden).values()
    of_model = ITEM * (layers * sum(outputs * inputs for outputs, inputs in each) + vocabulary * hidden)
    of_adapter = layers * ITEM * rank * sum(outputs + inputs for outputs, inputs in each)
    with tempfile.TemporaryDirectory(prefix="orca-adapters-") as temporary:
        folder = Path(temporary)
        make_model(folder / "model", hidden, layers, vocabulary)
        adapters = [Adapter(f"a{n}", folder / f"a{n}") for n in range(rows)]
        for n, adapter in enumerate(adapters):
            make_adapter(adapter.folder, hidden, layers, rank, n)
        engine = Rows(folder / "model", adapters, rows, threads)
        taken = [[engine.increment(way) for way in range(len(engine.ways))] for _ in range(WARM_UP + turns)][WARM_UP:]
    of_thread = threads == 1
    base = statistics.median(turn[0][of_thread] for turn in taken)
    for way, (name, read) in enumerate(zip(engine.ways, (0, of_adapter, rows * of_adapter), strict=True)):
        clock, ran = ([turn[way][kind] for turn in taken] for kind in (0, 1))
        yield {
            "rows": rows,
            "adapters": name,
            "ms": [round(of(clock), 2) for of in (min, statistics.median)],
            "thread_ms": [round(of(ran), 2) for of in (min, statistics.median)],
            "model_MB": round(of_model / 1e6, 1),
            "adapters_MB": round(read / 1e6, 1),
            "throughput": round(base / statistics.median(ran if of_thread else clock), 3),
            "threads": threads,
            "isa": isa(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--hidden", type=int, default=2048, help="a multiple of 512")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=600)
    for line in lines(**vars(parser.parse_args())):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
