"""The table of both engines, and what each format of the weights costs: from lines as the commands print them."""

import json
import subprocess
import sys
from pathlib import Path

from properties import PART

from orca_bench.llama_cpp import CASES, commands, named, table
from orca_bench.perplexity import lines, report
from orca_local.stack import DEMO_MODEL


def test_each_format_beside_its_peer(tmp_path: Path) -> None:
    own = {None: 2.0, "int8": 1.0, "int4": 0.5}
    ours = [
        {"engine": "orca", "dtype": "bfloat16", "quantize": way, "case": "a", "seconds": s} for way, s in own.items()
    ]
    theirs = [{"engine": f"llama-{kind}", "case": "a", "seconds": 3.0} for kind in ("bf16", "q8_0")]
    head, _, row = table([named(line) for line in (*ours, *theirs)]).splitlines()
    assert head.startswith("| case | orca bfloat16, s | llama-bf16, s | times | orca int8, s | llama-q8_0, s | times |")
    assert row == "| a | 2.000 | 3.000 | 1.50 | 1.000 | 3.000 | 3.00 | 0.500 | - | - |"
    peer = tmp_path / "peer.py"
    peer.write_text("import os, sys; print(os.environ['CASES'], *sys.argv[1:])")
    made = list(commands("m", "with space/f", f"{sys.executable} {peer}", CASES[:2]))
    assert [("--quantize" in one, "--case b1_32_32 --case b8_32_32" in one) for one in made[::2]] == [
        *((False, True), (True, True), (True, True))
    ]
    said = subprocess.run(made[5], shell=True, capture_output=True, text=True, check=True).stdout
    assert said == "b1_32_32,b8_32_32 with space/f-q4_0.gguf llama-q4_0\n"


def test_eight_bits_lose_less_than_four() -> None:
    found = list(lines([DEMO_MODEL], 4 if PART == 1 else 1))
    by = {line["format"]: line for line in found}
    assert [*by] == [
        *("float32", "bfloat16", "int8, float32", "int8, bfloat16"),
        *("int4, float32", "int4, bfloat16"),
        *(f"{dtype}, keys and values in int8" for dtype in ("float32", "bfloat16")),
    ]
    plain, eight, four, kv = (by[name]["perplexity"] for name in ("float32", *[*by][2::2]))
    assert abs(kv / plain - 1) < 0.005
    assert abs(eight / plain - 1) < 0.005
    assert 0.005 < four / plain - 1 < 0.06
    assert by["int4, float32"]["weights_MB"] < by["bfloat16"]["weights_MB"]
    rows, picture = report(json.loads(json.dumps(found)))
    assert rows.count("\n") == 9
    assert "int4" in picture
