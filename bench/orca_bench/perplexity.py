"""The cost of each format of the weights: perplexity on text that the model has not seen, and bytes.

    python -m orca_bench.perplexity [--model FOLDER ..] [--windows 20] > LINES
    python -m orca_bench.perplexity --report LINES PICTURE > TABLE

Each model in float32 and bfloat16, in these with the matrices of its layers in int8 and in int4, and with keys and
values in int8; a checkpoint that another tool has quantized as it is. The text is what `orca_lab.train_demo` holds out:
files of the standard library, with an end of text before each, in windows of 511 tokens or of the model's positions. A
line of JSON for each.
"""

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from orca.v1 import worker_pb2
from orca.v1.sampling_pb2 import SamplingParams
from orca_common.checkpoint import Checkpoint, read_checkpoint, resolve_model
from orca_common.scores import unpack_prompt
from orca_kernels.cpu.cores import cores
from orca_lab.chart import Bars, Panel, draw
from orca_lab.train_demo import encode, read_library
from orca_local.stack import DEMO_MODEL
from orca_scheduler.ranks.members import initiation, put_members
from orca_worker.iteration.model import Compute
from orca_worker.models.families import family_of
from orca_worker.partition import SINGLE, Types
from orca_worker.stage.stage import Stage

from .machine import isa
from .schedule import BLOCK_SIZE

LONGEST = 511  # tokens of a window: the demo model has 512 positions, one of them for what is made behind it
DTYPES = ("float32", "bfloat16")
WAYS = ((None, None), ("int8", None), ("int4", None), (None, "int8"))  # of the matrices, of keys and values


def windows(folder: Path, length: int) -> list[list[int]]:
    """Whole windows of the held-out text, in the model's own tokens."""
    stream = encode(Tokenizer.from_file(str(folder / "tokenizer.json")), read_library(0)[1])
    return stream.unfold(0, length, length).tolist()


@torch.inference_mode()
def perplexity(checkpoint: Checkpoint, types: Types, texts: Sequence[Sequence[int]]) -> float:
    """e to the mean of -log p of all tokens but each window's first, by the kernels that serve the model."""
    blocks = -(-(len(texts[0]) + 1) // BLOCK_SIZE)
    stage = Stage(checkpoint, types, torch.device("cpu"), blocks * BLOCK_SIZE, Compute(cores(), "auto"))
    stage.form(BLOCK_SIZE)
    stage.allocate(blocks * BLOCK_SIZE, BLOCK_SIZE)
    logprobs = list[float]()
    for n, tokens in enumerate(texts):
        iteration = worker_pb2.Iteration(number=n + 1, free_rows=[0] if n else [])
        scored = SamplingParams(prompt_logprobs=True)
        iteration.admissions.add(row=0, claim=n + 1, token_ids=tokens, sampling=scored)
        put_members(iteration, [initiation(0, len(tokens), range(blocks))])
        scores = stage.run(iteration).prompts[0]
        logprobs += (own for own, _ in unpack_prompt(scores, 0) if own is not None)
    return math.exp(-sum(logprobs) / len(logprobs))


def lines(models: Sequence[Path], most: int | None) -> Iterator[dict[str, Any]]:
    for folder in models:
        plain = read_checkpoint(folder)
        texts = windows(plain.folder, min(LONGEST, plain.max_positions - 1))[:most]
        ways = WAYS if plain.quantization is None else WAYS[:1]
        for (quantize, kv), dtype in ((way, dtype) for way in ways for dtype in DTYPES):
            checkpoint, types = read_checkpoint(folder, quantize), Types.of(dtype, kv)
            weights = family_of(checkpoint).share(checkpoint, SINGLE, types).weight_bytes
            found = perplexity(checkpoint, types, texts)
            name = quantize or (plain.name if plain.quantization is not None else "")
            name = f"{name}, {dtype}" if name else dtype
            yield {
                "model": plain.name,
                "format": name if kv is None else f"{name}, keys and values in {kv}",
                "perplexity": round(found, 3),
                "weights_MB": round(weights / 1e6, 2),
                "windows": len(texts),
                "tokens": len(texts[0]),
                "isa": isa(),
            }


def report(found: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """A table in Markdown, and a picture: what each takes and loses against the first one."""
    best = found[0]["perplexity"]
    rows = ["| format | weights, MB | perplexity | more |", "| --- | --- | --- | --- |"]
    for line in found:
        more = (line["perplexity"] / best - 1) * 100
        rows.append(f"| {line['format']} | {line['weights_MB']} | {line['perplexity']} | {more:.2f} % |")
    panels = list[Panel]()
    for title, value in (
        ("Weights, MB", lambda line: line["weights_MB"]),
        ("Perplexity, % more", lambda line: (line["perplexity"] / best - 1) * 100),
    ):
        bars = [Bars(line["format"], [(value(line),) * 3]) for line in found]
        panels.append(Panel(title, "", title, bars=bars, groups=[""]))
    return "\n".join(rows), draw(f"Formats of {found[0]['model']}'s weights", panels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=[str(DEMO_MODEL)])
    parser.add_argument("--windows", type=int, help="the first ones alone")
    parser.add_argument("--report", nargs=2, type=Path, metavar=("LINES", "PICTURE"))
    given = parser.parse_args()
    if given.report:
        file, picture = given.report
        table, svg = report([json.loads(line) for line in file.read_text().splitlines()])
        picture.write_text(svg)
        print(table)
        return
    for line in lines([resolve_model(model) for model in given.model], given.windows):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
