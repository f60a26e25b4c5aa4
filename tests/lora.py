"""LoRA adapters in the files that PEFT writes, and the model that each of them makes of its base."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.pytorch_utils import Conv1D

from orca_common.adapters import Adapter
from orca_common.checkpoint import read_checkpoint

HEADS = ("lm_head", "embed_out")


class Lora(NamedTuple):
    """An adapter that was written, and its numbers by the name of the module."""

    adapter: Adapter
    changes: Mapping[str, tuple[float, Tensor, Tensor]]  # scale, A [rank, inputs], B [outputs, rank]

    def merged(self, base: Path) -> Any:
        """The base in transformers, with W + scale * B A instead of each W."""
        model = load(base)
        with torch.no_grad():
            for name, (scale, a, b) in self.changes.items():
                module, change = model.get_submodule(name), scale * b @ a
                module.weight += change.t() if isinstance(module, Conv1D) else change
        return model


def load(folder: Path) -> Any:
    """A checkpoint in transformers, in float32."""
    kind = AutoModelForSeq2SeqLM if read_checkpoint(folder).has_encoder else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def make_lora(
    folder: Path,
    base: Path,
    name: str,
    *,
    seed: int,
    rank: int = 4,
    alpha: float = 8,
    targets: Sequence[str] = (),
    ranks: Mapping[str, int] | None = None,
    alphas: Mapping[str, float] | None = None,
    size: float = 0.6,
    **config: Any,
) -> Lora:
    """Writes an adapter of random numbers into a new folder. Its change of a weight is about `size` of the weight.

    targets: the last parts of the modules' names; none: all linear ones of the layers. ranks, alphas: patterns.
    """
    generator, changes = torch.Generator().manual_seed(seed), dict[str, tuple[float, Tensor, Tensor]]()
    for module_name, module in load(base).named_modules():
        kind = module_name.rpartition(".")[2]
        if not isinstance(module, torch.nn.Linear | Conv1D) or kind in HEADS or (targets and kind not in targets):
            continue
        weight = module.weight.t() if isinstance(module, Conv1D) else module.weight
        outputs, inputs = weight.shape
        r, at = (ranks or {}).get(kind, rank), (alphas or {}).get(kind, alpha)
        scale = at / r**0.5 if config.get("use_rslora") else at / r
        a = torch.randn(r, inputs, generator=generator)
        b = torch.randn(outputs, r, generator=generator) * (size * float(weight.detach().std()) / (r**0.5 * scale))
        changes[module_name] = scale, a, b
    assert changes
    folder.mkdir()
    fields = {
        "peft_type": "LORA",
        "base_model_name_or_path": "somewhere/else",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({one.rpartition(".")[2] for one in changes}),
        "rank_pattern": ranks or {},
        "alpha_pattern": alphas or {},
        "bias": "none",
        "init_lora_weights": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    tensors = {
        f"base_model.model.{module}.lora_{letter}.weight": tensor.contiguous()
        for module, (_, *pair) in changes.items()
        for letter, tensor in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return Lora(Adapter(name, folder), changes)
