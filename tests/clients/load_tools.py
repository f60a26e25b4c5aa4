"""Load tools of others beside `orca bench serve`, on the same load: make load-tools URL=http://127.0.0.1:8000.

    python tests/clients/load_tools.py URL TOKENIZER [PYTHON]

PYTHON is one that has vLLM's bench; uv installs the other tools. Keeps 4 and then 16 requests of 128 tokens in flight
that make 64 each. Prints a table: throughput over a run, medians over its requests, and the processor time that the
tool itself took, its start included: on a machine that also computes the model it is time of the model. Figures need a
quiet machine.
"""

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

INPUT, OUTPUT, ROUNDS = 128, 64, 5
MODEL = "demo_model"
UV = [sys.executable, "-m", "uv", "tool", "run", "--quiet"]
Figures = tuple[float, float, float]  # output tokens a second, ms to the first token, ms a token after it


def run(command: list[str]) -> str:
    """Returns the output of a command. Raises with its last words."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def orca(url: str, tokenizer: str, streams: int, folder: Path) -> Figures:
    """Rounds of `streams` requests at once; the next begins when all have ended."""
    shape = ["--batch", str(streams), "--input", str(INPUT), "--output", str(OUTPUT), "--runs", str(ROUNDS)]
    command = [str(Path(sys.executable).with_name("orca")), "bench", "serve", "--openai", url, *shape]
    rounds = [json.loads(line) for line in run(command).splitlines() if line.startswith("{")]
    first = median(one["first_token_ms_p50"] for one in rounds)
    whole = median(one["normalized_latency_ms_p50"] for one in rounds) * OUTPUT
    throughput = sum(one["output_tokens"] for one in rounds) / sum(one["seconds"] for one in rounds)
    return throughput, first, (whole - first) / (OUTPUT - 1)


def guidellm(url: str, tokenizer: str, streams: int, folder: Path) -> Figures:
    out = folder / "guidellm.json"
    backend = f"kind=openai_http,target={url},model={MODEL},request_format=/v1/completions"
    command = [*UV, "--from", "guidellm==0.8.1", "guidellm", "run", "--disable-console", "--backend", backend]
    command += ["--profile", f"kind=concurrent,streams={streams}"]
    command += ["--constraint", f"kind=max_requests,count={ROUNDS * streams}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}"]
    run([*command, "--tokenizer", f"kind=hf_auto,model={tokenizer}", "--output", f"kind=json,path={out}"])
    metrics = json.loads(out.read_text())["benchmarks"][0]["metrics"]

    def of(name: str, figure: str) -> Any:
        return metrics[name]["successful"][figure]

    return (
        of("output_tokens_per_second", "mean"),
        of("time_to_first_token_ms", "median"),
        of("inter_token_latency_ms", "median"),
    )


def aiperf(url: str, tokenizer: str, streams: int, folder: Path) -> Figures:
    command = [*UV, "--from", "aiperf==0.13.0", "aiperf", "profile", "--model", MODEL, "--url", url, "--ui", "none"]
    command += ["--endpoint-type", "completions", "--streaming", "--isl", str(INPUT), "--osl", str(OUTPUT)]
    command += ["--concurrency", str(streams), "--request-count", str(ROUNDS * streams), "--tokenizer", tokenizer]
    run([*command, "--extra-inputs", "ignore_eos:true", "--artifact-dir", str(folder / "aiperf")])
    told = json.loads((folder / "aiperf/profile_export_aiperf.json").read_text())
    return (
        told["output_token_throughput"]["avg"],
        told["time_to_first_token"]["p50"],
        told["inter_token_latency"]["p50"],
    )


BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def vllm(python: str, url: str, tokenizer: str, streams: int, folder: Path) -> Figures:
    command = [
        python,
        "-c",
        BENCH,
        "--backend",
        "openai",
        "--base-url",
        url,
        "--model",
        MODEL,
        "--tokenizer",
        tokenizer,
    ]
    command += ["--dataset-name", "random", "--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT)]
    command += ["--max-concurrency", str(streams), "--num-prompts", str(ROUNDS * streams), "--ignore-eos"]
    run([*command, "--save-result", "--result-dir", str(folder), "--result-filename", "vllm.json"])
    told = json.loads((folder / "vllm.json").read_text())
    assert told["completed"] == ROUNDS * streams, told["errors"]
    return told["output_throughput"], told["median_ttft_ms"], told["median_tpot_ms"]


TOOLS: dict[str, Callable[[str, str, int, Path], Figures]] = {
    "orca bench serve": orca,
    "guidellm 0.8.1": guidellm,
    "aiperf 0.13.0": aiperf,
}


def main(url: str, tokenizer: str, python: str = "") -> None:
    tools = TOOLS | ({"vllm bench serve": partial(vllm, python)} if python else {})
    columns = ("tool", "at once", "tokens/s", "first token, ms", "a token after it, ms", "s of its own")
    print(f"| {' | '.join(columns)} |\n| {'--- | ' * len(columns)}".rstrip())
    for streams in (4, 16):
        for name, tool in tools.items():
            before = own_seconds()
            with tempfile.TemporaryDirectory() as folder:
                throughput, first, later = tool(url, tokenizer, streams, Path(folder))
            own = own_seconds() - before
            print(f"| {name} | {streams} | {throughput:.0f} | {first:.0f} | {later:.1f} | {own:.1f} |", flush=True)


def own_seconds() -> float:
    """Processor time of all commands so far."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


if __name__ == "__main__":
    main(*sys.argv[1:])
