"""Tensors by name from the safetensors files of a checkpoint folder: one file, or several under an index."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from orca_common.checkpoint import WEIGHT_NAMES
from orca_common.errors import FailedPrecondition


class Weights:
    """`prefix` may stand before a name in the files, or not: published checkpoints differ."""

    def __init__(self, folder: Path, prefix: str, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._prefix, self._dtype, self._device = folder, prefix, dtype, device
        single, index = (folder / name for name in WEIGHT_NAMES)
        files = [single.name]
        try:
            if index.exists() and not single.exists():
                files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            opened = [safe_open(folder / file, framework="pt") for file in files]
        except FileNotFoundError:
            raise FailedPrecondition(f"model: {folder} lacks weights in safetensors ({', '.join(files)})") from None
        except (SafetensorError, KeyError, AttributeError, ValueError) as error:
            raise FailedPrecondition(f"model: the weights in {folder} cannot be read ({error})") from None
        self._file_of = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 it is no dictionary

    def get(self, name: str, *shape: int) -> Tensor:
        """A tensor in this model's type and on its device. Raises FailedPrecondition when it is missing or of
        another shape."""
        found = name if name in self._file_of else self._prefix + name
        if found not in self._file_of:
            raise FailedPrecondition(f"model: the weights in {self._folder} lack {name}")
        tensor = self._file_of[found].get_tensor(found)
        if tensor.shape != shape:
            has = list(tensor.shape)
            raise FailedPrecondition(f"model: {name} in {self._folder} is {has}, config.json says {list(shape)}")
        return tensor.to(self._device, self._dtype)
