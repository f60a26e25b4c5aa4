"""Orca beside llama.cpp, format by format: bfloat16, eight bits and four bits of the same Llama shape, in one sitting.

    python -m orca_bench.llama_cpp --model FOLDER --gguf FILES --llama COMMAND [--rounds 3] [--lines LINES]

COMMAND runs llama.cpp on a file (its first argument) with a name for its lines (the second one), and takes the names of
cases from CASES: it prints the lines of `orca bench engine`. FILES-bf16.gguf, FILES-q8_0.gguf and FILES-q4_0.gguf are
the model's. In each round all six run in turn; the table has medians, and how many times Orca's time llama.cpp takes.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from orca_kernels.cpu.cores import cores

from .compare import Line, medians, ratio, rounds, seconds
from .machine import isa, processor

CASES = ("b1_32_32", "b8_32_32", "b8_128_32", "b32_32_32")
PAIRS = {None: "bf16", "int8": "q8_0", "int4": "q4_0"}  # quantize -> the type of llama.cpp


def commands(model: str, files: str, llama: str, cases: Sequence[str]) -> Iterator[str]:
    """A shell command for each engine and format; theirs say their names themselves."""
    orca = [sys.executable, "-m", "orca_cli", "bench", "engine", "--dtype", "bfloat16", "--runs", "1", "--model", model]
    for quantize, kind in PAIRS.items():
        given = [] if quantize is None else ["--quantize", quantize]
        yield shlex.join([*orca, *given, *(word for case in cases for word in ("--case", case))])
        yield f"CASES={','.join(cases)} {llama} {shlex.quote(f'{files}-{kind}.gguf')} llama-{kind}"


def table(found: Sequence[Line]) -> str:
    """Makes a table in Markdown: for each pair Orca's seconds, those of llama.cpp, and theirs over Orca's."""
    names = [(f"orca {quantize or 'bfloat16'}", f"llama-{kind}") for quantize, kind in PAIRS.items()]
    head = [cell for ours, theirs in names for cell in (f"{ours}, s", f"{theirs}, s", "times")]
    rows = [["case", *head], ["---"] * (1 + len(head))]
    for case, each in medians(found).items():
        pairs = [(each.get(ours), each.get(theirs)) for ours, theirs in names]
        rows.append(
            [case, *(cell for one, other in pairs for cell in (seconds(one), seconds(other), ratio(other, one)))]
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def named(line: Line) -> Line:
    """Orca's line with its format in the engine's name."""
    return {**line, "engine": f"orca {line['quantize'] or line['dtype']}"} if line["engine"] == "orca" else line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--gguf", required=True, metavar="FILES")
    parser.add_argument("--llama", required=True, metavar="COMMAND")
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lines", type=Path, help="file that gets all lines, as they come")
    given = parser.parse_args()
    found = list[Line]()
    all_commands = list(commands(given.model, given.gguf, given.llama, given.cases))
    for line in rounds(all_commands, given.rounds, lambda state: print(state, file=sys.stderr)):
        found.append(named(line))
        if given.lines:
            given.lines.write_text("".join(json.dumps(one) + "\n" for one in found))
    print(
        f"{processor()}, {cores()} cores, {isa()}; medians of {given.rounds} rounds in one sitting\n\n{table(found)}",
        end="",
    )


if __name__ == "__main__":
    main()
