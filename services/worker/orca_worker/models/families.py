"""The families of models, by `model_type` of their config.json. A new family is one folder, and one line here.

gpt2                           GPT-2
gpt_neox                       GPT-NeoX, Pythia
gptj                           GPT-J
llama, mistral, qwen2, qwen3   the Llama shape
gemma3_text                    Gemma 3, text alone
t5                             T5, T5 v1.1, Flan-T5
marian                         Marian, the original Transformer
orca_timed                     no model: it waits, for experiments with the control plane, and needs no torch
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from orca_common.adapters import Adapter
from orca_common.checkpoint import Checkpoint, model_type, public_name, quantization, sort_of
from orca_common.errors import FailedPrecondition
from orca_common.gguf.folder import gguf_file
from orca_common.gguf.header import gguf_header

from ..iteration.model import Compute, Family, Loading, Model, ReadAdapter
from ..partition import Place, RankShare, Types
from . import gemma3, gpt2, gptj, llama, marian, neox, t5
from .formats.layout import layout_of
from .timed.family import TimedFamily

if TYPE_CHECKING:
    import torch

FAMILIES: dict[str, Family] = {
    "gpt2": gpt2.FAMILY,
    "gpt_neox": neox.FAMILY,
    "gptj": gptj.FAMILY,
    "llama": llama.FAMILY,
    "mistral": llama.FAMILY,
    "qwen2": llama.FAMILY,
    "qwen3": llama.FAMILY,
    "gemma3_text": gemma3.FAMILY,
    "t5": t5.FAMILY,
    "marian": marian.FAMILY,
    "orca_timed": TimedFamily(),
}


def family_of(checkpoint: Checkpoint) -> Family:
    """Raises FailedPrecondition when no family knows the model."""
    return _family(checkpoint.model_type, checkpoint.name)


def check_type(folder: Path) -> None:
    """Raises FailedPrecondition when no family knows the model in a folder, or its weights were quantized in a way that
    is not read. Only config.json is read."""
    _family(model_type(folder), public_name(folder), sort_of(folder))
    layout_of(quantization(folder), public_name(folder))


def _family(kind: str, name: str, sort: str = "") -> Family:
    family = FAMILIES.get(kind)
    if family is None:
        served = ", ".join(known for known in FAMILIES if not known.startswith("orca_"))  # without our experiments
        raise FailedPrecondition(f"model: {name} is of type {kind}{sort}; Orca has {served}")
    return family


def layout_sentence(checkpoint: Checkpoint) -> str | None:
    """Names the quantization of the files by another tool, or the types of a GGUF file; None: they are numbers in
    safetensors. Raises FailedPrecondition."""
    file = gguf_file(checkpoint.folder) if checkpoint.random_weights is None else None
    if file is not None:
        return "GGUF, " + " and ".join(sorted({tensor.kind for tensor in gguf_header(file).tensors.values()}))
    layout = layout_of(checkpoint.quantization, checkpoint.name)
    return None if layout is None else layout.sentence


def load_model(
    checkpoint: Checkpoint,
    place: Place,
    types: Types,
    device: torch.device | None,
    compute: Compute,
    loading: Loading | None = None,
) -> tuple[Model, int]:
    """Loads a rank's slice: the model, and how many bytes of weights were read.

    `device` is None only if the family needs no torch. Raises FailedPrecondition with a sentence.
    """
    return family_of(checkpoint).load(checkpoint, place, types, device, compute, loading or Loading())


def modules_of(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The modules that a rank imports for a model: with torch 1 to 2 s, so it is imported before it is needed."""
    family = family_of(checkpoint)
    return ("orca_worker.data_plane.process_groups", *family.modules) if family.needs_torch else ()


def check_partition(checkpoint: Checkpoint, tensor_parallel: int, pipeline_parallel: int) -> None:
    """Raises FailedPrecondition with a sentence when the model cannot be cut into tp x pp ranks."""
    family_of(checkpoint).check(checkpoint, tensor_parallel, pipeline_parallel)


def adapter_file(checkpoint: Checkpoint, adapter: Adapter) -> ReadAdapter:
    """An adapter's file. Raises FailedPrecondition with a sentence where it is wrong, or does not fit the model."""
    return family_of(checkpoint).adapter(checkpoint, adapter)


def check_weights(checkpoint: Checkpoint) -> None:
    """Raises FailedPrecondition with a sentence when a file of the weights is missing or is not whole."""
    if checkpoint.random_weights is None:
        family_of(checkpoint).check_weights(checkpoint)


def topology(checkpoint: Checkpoint, tensor_parallel: int, pipeline_parallel: int, types: Types) -> list[RankShare]:
    """The ranks of an engine, in their order, before anything runs. Raises FailedPrecondition with a sentence."""
    check_partition(checkpoint, tensor_parallel, pipeline_parallel)
    places = [
        Place(tensor_parallel, pipeline_parallel, *divmod(index, tensor_parallel))
        for index in range(tensor_parallel * pipeline_parallel)
    ]
    family = family_of(checkpoint)
    return [family.share(checkpoint, place, types) for place in places]
