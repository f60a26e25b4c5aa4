"""The files of a LoRA adapter, as PEFT writes them, without torch: what changes which linear operation of a model.

An adapter gives a linear operation y = x W^T the matrices A [rank, inputs] and B [outputs, rank], and y becomes
x W^T + scale * x A^T B^T (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1). The scale is
alpha / rank, or alpha / sqrt(rank) with rsLoRA (Kalajdzievski, "A Rank Stabilization Scaling Factor").
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from orca_common.adapters import Adapter
from orca_common.bounded_file import json_object, open_regular, read_bounded, shown
from orca_common.checkpoint import CONFIG_BYTES
from orca_common.errors import FailedPrecondition

from ..partition import Slice
from .header import Stored, header_of
from .recording import Gated, Linear, Matrix, Operation, Recording, Residual

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK, MAX_ALPHA, MAX_NAME = 256, 1 << 20, 1024
KINDS = ("F32", "F16", "BF16")
TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
PLAIN = re.compile(r"[\w.]+")  # a key of a pattern that is no regular expression
# Fields that say how an adapter was made, and nothing of what it computes.
OF_TRAINING = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("target_modules", "exclude_modules", "lora_dropout", "fan_in_fan_out", "layers_to_transform", "layers_pattern"),
    *("megatron_config", "megatron_core", "eva_config", "qalora_group_size", "runtime_config", "ensure_weight_tying"),
}
READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "bias"}
BEGINNINGS = ("gaussian", "orthogonal", "eva")  # init_lora_weights that leave the model's own weights as they are
WAYS = {  # what is refused, in words
    "use_dora": "DoRA",
    "lora_bias": "biases of its own (lora_bias)",
    "modules_to_save": "whole modules of its own (modules_to_save)",
}


class Change(NamedTuple):
    """The summand of one linear operation."""

    scale: float
    a: Stored  # [rank, inputs]
    b: Stored  # [outputs, rank]


class AdapterFile(NamedTuple):
    """An adapter that has been read, but for its numbers."""

    name: str
    path: Path
    changes: Mapping[str, Change]  # by the tensor's name in a recording


def read_adapter(adapter: Adapter, prefix: str) -> AdapterFile:
    """Reads configuration and header. prefix: what names of the model's tensors may begin with.

    Raises FailedPrecondition with a sentence that names the adapter.
    """
    config = _config(adapter)
    path = adapter.folder / WEIGHTS
    try:
        header = header_of(path)
    except FileNotFoundError:
        raise _wrong(adapter, f"{adapter.folder} holds no {WEIGHTS}") from None
    except FailedPrecondition as error:
        raise _wrong(adapter, str(error).removeprefix("model: ")) from None
    pairs = dict[str, dict[str, Stored]]()
    for name, stored in header.tensors.items():
        found = TENSOR.fullmatch(name)
        if found is None or len(name) > MAX_NAME or stored.kind not in KINDS or len(stored.shape) != 2:
            kind = f"{stored.kind} {list(stored.shape)}"
            raise _wrong(adapter, f"{shown(name)} in {path} ({kind}) is no matrix of a LoRA")
        pairs.setdefault(found[1], {})[found[2]] = stored
    if not pairs:
        raise _wrong(adapter, f"{path} holds no matrices")
    changes = dict[str, Change]()
    for module, pair in pairs.items():
        name = module.removeprefix(prefix)
        if name + ".weight" in changes:
            raise _wrong(adapter, f"{shown(prefix + name)} and {shown(name)} are one module, and {path} has both")
        changes[name + ".weight"] = _change(adapter, config, module, pair)
    return AdapterFile(adapter.name, path, changes)


def check_adapters(adapters: Sequence[Adapter], prefix: str, whole: Recording) -> None:
    """Raises FailedPrecondition for an adapter that is wrong, or does not fit the model. whole: all of its layers."""
    if not adapters:
        return
    sizes = {
        part.name: part.shape[::-1] if matrix.transposed else part.shape
        for matrix in matrices_of(whole)
        for part in matrix.weights
    }
    for adapter in adapters:
        for name, change in read_adapter(adapter, prefix).changes.items():
            module = name.removesuffix(".weight")
            if name not in sizes:
                known = ", ".join(sorted({one.removesuffix(".weight").rpartition(".")[2] for one in sizes}))
                problem = f"{shown(module)} is no linear operation of the model's layers; those are named {known}"
                raise _wrong(adapter, f"it is for another model: {problem}")
            shape = change.b.shape[0], change.a.shape[1]
            if shape != sizes[name]:
                raise _wrong(
                    adapter,
                    f"it is for another model: {shown(module)} is {list(shape)}, the model's is {list(sizes[name])}",
                )


def matrices_of(recording: Recording) -> Iterator[Matrix]:
    """The matrices of all linear operations of the layers."""
    operations: list[Operation] = [*recording.encoder, *recording.crossing, *recording.operations]
    for operation in operations:
        match operation:
            case Linear(_, matrix):
                yield matrix
            case Gated(_, gate, up):
                yield from (gate, up)
            case Residual(terms):
                yield from (matrix for _, matrix in terms)


def elements_of(file: AdapterFile, recording: Recording) -> int:
    """Counts the numbers in a rank's slices of an adapter."""
    parts = (part for matrix in matrices_of(recording) for part in matrix.weights if part.name in file.changes)
    return sum(file.changes[part.name].a.shape[0] * sum(part.size) for part in parts)


def is_cut_along_outputs(part: Slice, matrix: Matrix) -> bool:
    """Whether the slice has some of the outputs, and all inputs."""
    return part.axis == int(matrix.transposed)


def fingerprint(adapter: Adapter) -> str:
    """16 hexadecimal digits of the adapter's files. Faults of a file are found by `read_adapter`."""
    found = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        try:
            with open(open_regular(adapter.folder / name), "rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
        except (FailedPrecondition, OSError):
            found.update(b"-")
    return found.hexdigest()[:16]


def _config(adapter: Adapter) -> dict[str, Any]:
    path = adapter.folder / CONFIG
    try:
        config = json_object(read_bounded(path, CONFIG_BYTES), path)
    except FileNotFoundError:
        raise _wrong(adapter, f"{adapter.folder} holds no {CONFIG}") from None
    except FailedPrecondition as error:
        raise _wrong(adapter, str(error).removeprefix("model: ")) from None
    kind = config.get("peft_type")
    if kind != "LORA":
        raise _wrong(adapter, f"{path} says peft_type {shown(kind)}; Orca has LORA")
    for name, value in config.items():
        if value and name not in OF_TRAINING | READ:
            raise _wrong(adapter, f"it has {WAYS.get(name, name)}, which Orca does not have ({path})")
    if config.get("bias", "none") != "none":
        raise _wrong(adapter, f"it has biases of the model ({path} says bias {shown(config['bias'])}); Orca has none")
    begun = config.get("init_lora_weights", True)
    if type(begun) is not bool and begun not in BEGINNINGS:
        problem = f"init_lora_weights {shown(begun)}, which changes the model's own weights"
        raise _wrong(adapter, f"{path} says {problem}: save it as a plain LoRA")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise _wrong(adapter, f"{path}: r is {shown(rank)}, not a rank from 1 to {MAX_RANK}")
    patterns = {name: config.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
    for name, pattern in patterns.items():
        if not isinstance(pattern, dict) or not all(PLAIN.fullmatch(key) for key in pattern):
            raise _wrong(adapter, f"{path}: {name} must be by the names of modules; Orca has no patterns beyond")
    for value in (alpha, *patterns["alpha_pattern"].values()):
        if not isinstance(value, int | float) or not -MAX_ALPHA <= value <= MAX_ALPHA:
            raise _wrong(adapter, f"{path}: lora_alpha is {shown(value)}, not a number up to {MAX_ALPHA}")
    return config | {
        name: {key: (n, value) for n, (key, value) in enumerate(pattern.items())} for name, pattern in patterns.items()
    }


def _change(adapter: Adapter, config: Mapping[str, Any], module: str, pair: Mapping[str, Stored]) -> Change:
    if len(pair) < 2:
        raise _wrong(adapter, f"{shown(module)} has lora_{next(iter(pair))} alone")
    a, b = pair["A"], pair["B"]
    rank = a.shape[0]
    said = _by_name(config["rank_pattern"], module, config["r"])
    if b.shape[1] != rank or rank != said:
        shapes = f"A {list(a.shape)} and B {list(b.shape)}"
        raise _wrong(adapter, f"{shown(module)} has {shapes}; {CONFIG} says rank {shown(said)}")
    if not 1 <= rank <= MAX_RANK:
        raise _wrong(adapter, f"{shown(module)} has the rank {rank}; 1 to {MAX_RANK} are served")
    alpha = _by_name(config["alpha_pattern"], module, config["lora_alpha"])
    return Change(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), a, b)


def _by_name(pattern: Mapping[str, tuple[int, Any]], module: str, default: Any) -> Any:
    """The value of the first key that is the module's name, or its end. pattern: places and values by key."""
    parts = module.split(".") if pattern else ()
    ends = (".".join(parts[n:]) for n in range(len(parts)))
    found = [pattern[end] for end in ends if end in pattern]
    return min(found, key=lambda one: one[0])[1] if found else default


def _wrong(adapter: Adapter, problem: str) -> FailedPrecondition:
    return FailedPrecondition(f"adapter {adapter.name}: {problem}")
