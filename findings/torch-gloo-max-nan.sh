#!/bin/sh
# torch 2.13.0: an all-reduce of the maximum over gloo may lose a NaN. Whether it does depends on the rank.
#
# Guess before: NaN goes through, as in `torch.maximum` and `amax`, or is passed over, as in `fmax`, but for all ranks
# and places alike. Where one of two ranks has 64 NaNs, 32 are left, whichever rank it is. A single number, such as
# the largest magnitude from which all ranks take the scale of eight-bit floats, is NaN if rank 0 has the NaN, and a
# number like any other if rank 1 has it. Both ranks get the same, so that they agree on a scale for broken
# activations. The minimum does likewise; a sum is NaN everywhere.
#
# Seen with: torch 2.13.0, numpy 2.4.6, Python 3.11, Linux x86-64, on CPUs. Prints how many of the numbers are NaN,
# and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/rank.py" <<'PYTHON'
import math
import sys

import torch
import torch.distributed as dist

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)


def found(operation, owner, size):
    """How many of the reduced numbers are NaN, where all of one rank's are NaN before."""
    numbers = torch.full((size,), math.nan if rank == owner else 1.0)
    dist.all_reduce(numbers, op=operation)
    count = int(numbers.isnan().sum())
    print(f"rank {rank}: {operation} of {size}, NaN on rank {owner}: {count} NaN")
    return count


for operation in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
    assert [found(operation, owner, 64) for owner in (0, 1)] == [32, 32]
    assert [found(operation, owner, 1) for owner in (0, 1)] == [1, 0]
assert [found(dist.ReduceOp.SUM, owner, 64) for owner in (0, 1)] == [64, 64]
assert torch.maximum(torch.tensor(math.nan), torch.tensor(1.0)).isnan() and torch.tensor([1.0, math.nan]).amax().isnan()
dist.destroy_process_group()
PYTHON
"$folder/env/bin/python" "$folder/rank.py" "$folder/meet" 1 > "$folder/second" &
"$folder/env/bin/python" "$folder/rank.py" "$folder/meet" 0
wait $!
cat "$folder/second"
