"""A fine-tune of a checkpoint: the same configuration and tokenizer, other weights.

python tests/retrained.py MODEL FOLDER
"""

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"


def retrain(model: Path, folder: Path) -> Path:
    """Makes the fine-tune of a model in a folder. It is the same one each time."""
    shutil.copytree(model, folder)
    draw = torch.Generator().manual_seed(1)
    weights = load_file(folder / WEIGHTS)
    save_file(
        {name: _trained(tensor, draw) for name, tensor in weights.items()}, folder / WEIGHTS, metadata={"format": "pt"}
    )
    return folder


def _trained(tensor: Tensor, draw: torch.Generator) -> Tensor:
    """The tensor with as much noise as it has values of its own, where it is a matrix."""
    noise = tensor.float().std() * torch.randn(tensor.shape, generator=draw)
    return (tensor + noise).to(tensor.dtype) if tensor.dim() > 1 else tensor


if __name__ == "__main__":
    retrain(Path(sys.argv[1]), Path(sys.argv[2]))
