"""`orca_lab.cuda_kernels` times every kernel of a small batch."""

import json

import pytest
from kernels.triton_device import DEVICE

from orca_lab.cuda_kernels import main


def test_every_kernel_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    case = "--model gpt2-124m --dtype float16 --batch 1 --context 20 --prompt 3 --device"
    main([*case.split(), DEVICE.type])
    first, *rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first["copy_bytes_per_second"] > 0
    assert all(row["microseconds"] > 0 for row in rows)
    assert len(rows) == 6 + 2 + 2 + 2 + 5 + 1
    assert {row["kernel"] for row in rows} == {
        "write_kv",
        "split_attention",
        "add_norm",
        "bias_act",
        "greedy",
        "sample",
        "sample, top-k and top-p",
        *(f"matmul {name}" for name in ("qkv", "projection", "up", "down")),
        *(f"matmul {name}" for name in ("qkv", "projection", "up", "down")),
        "int8 projection",
    }
