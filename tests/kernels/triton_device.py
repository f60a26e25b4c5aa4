"""Where the tests of `triton_kernels/` run: on a GPU, or in Triton's interpreter with TRITON_INTERPRET=1."""

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu") if INTERPRETED else torch.device("cuda", 0)
# The interpreter computes bfloat16 wrongly, and says nothing.
TYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
EPSILON = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
