"""Checkpoint folders as a stranger might give them: what `read_checkpoint` and those after it must refuse or survive.

Each case makes its folder from a good one. `read_all` reads a folder as the services do: the configuration, the
tokenizer, the family's check and the weights of a single rank.
"""

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from orca_common.checkpoint import read_checkpoint, resolve_model
from orca_endpoint.text.vocabulary import Vocabulary
from orca_worker.iteration.model import Compute
from orca_worker.models.families import check_partition, load_model
from orca_worker.partition import SINGLE, Types

Case = Callable[[Path], object]
DEEP = 200_000
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_all(folder: Path) -> None:
    """Raises FailedPrecondition with a sentence when a service would refuse the folder."""
    checkpoint = read_checkpoint(resolve_model(str(folder)))
    if checkpoint.tokenizer_file is not None:
        vocabulary = Vocabulary(checkpoint.tokenizer_file)
        vocabulary.decode(vocabulary.encode("some text, grüße")[:8])
    check_partition(checkpoint, 1, 1)
    load_model(checkpoint, SINGLE, Types.of("float32"), torch.device("cpu"), Compute(1, "torch"))


def cases() -> Iterator[tuple[str, Case]]:
    """A name for each case, and what it does to a good folder."""
    for file in (CONFIG, GENERATION, TOKENIZER, WEIGHTS, INDEX):
        yield from ((f"{file}: {name}", _on(file, what)) for name, what in _kinds_of_file().items())
    for file in (CONFIG, GENERATION, TOKENIZER, INDEX):
        yield from ((f"{file}: {name}", _text(file, raw)) for name, raw in _broken_json().items())
    yield from ((f"config: {name} = {_short(value)}", _field(name, value)) for name, value in _config_values())
    yield from ((f"eos_token_id = {_short(value)}", _end_token(value)) for value in _end_tokens())
    yield from ((f"header: {name}", _header(raw)) for name, raw in _headers().items())
    yield from ((f"index: {name}", _text(INDEX, json.dumps(value).encode())) for name, value in _indexes())
    yield from ((f"tokenizer: {name}", _tokenizer(change)) for name, change in _tokenizers().items())


# -- files that are no files


def _kinds_of_file() -> dict[str, Case]:
    def loop(path: Path) -> None:
        path.symlink_to(path.name)

    def large(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(1 << 40)

    return {
        "a directory": Path.mkdir,
        "a FIFO": os.mkfifo,
        "a symlink to itself": loop,
        "a symlink to an endless device": lambda path: path.symlink_to("/dev/zero"),
        "a symlink to nothing": lambda path: path.symlink_to("nothing"),
        "empty": lambda path: path.write_bytes(b""),
        "a terabyte of holes": large,
    }


def _on(name: str, make: Case) -> Case:
    def case(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        if name == INDEX:
            (folder / WEIGHTS).unlink()
        make(folder / name)

    return case


# -- files that are no JSON


def _broken_json() -> dict[str, bytes]:
    return {
        "cut": b'{"vocab_size": 12',
        "deep lists": b"[" * DEEP,
        "deep objects": b'{"a":' * DEEP,
        "a number": b"7",
        "a list": b"[1, 2]",
        "null": b"null",
        "not UTF-8": b'{"vocab_size": "\xff\xfe"}',
        "UTF-16": '{"vocab_size": 7}'.encode("utf-16"),
        "a number of 10000 digits": b'{"vocab_size": ' + b"9" * 10_000 + b"}",
        "NaN": b'{"vocab_size": NaN, "n_positions": Infinity}',
    }


def _text(name: str, raw: bytes) -> Case:
    def case(folder: Path) -> None:
        (folder / name).write_bytes(raw)
        if name == INDEX:
            (folder / WEIGHTS).unlink()

    return case


# -- config.json


def _config_values() -> Iterator[tuple[str, Any]]:
    for name in ("vocab_size", "n_positions", "n_layer", "n_embd", "n_head", "n_inner"):
        yield from ((name, value) for value in (0, -1, 10**7, 10**18, 1e400, 2.5, "7", [7], True))
    for name in ("vocab_size", "n_positions", "model_type"):
        yield name, None
    yield from (("model_type", value) for value in ("llama", "x" * 500_000, 7, ["gpt2"], {"gpt2": 1}))
    yield from (("layer_norm_epsilon", value) for value in ("a", -1, 1e400, [1e-5], None))
    yield from (("activation_function", value) for value in ("exp", ["gelu"], {"a": 1}, 7, None))


def _field(name: str, value: Any) -> Case:
    def case(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        config[name] = value
        if value is None and name in ("vocab_size", "n_positions", "model_type"):
            del config[name]
        (folder / CONFIG).write_text(json.dumps(config).replace("Infinity", "1e400"))

    return case


def _end_tokens() -> tuple[Any, ...]:
    return "7", 2.5, True, {"a": 1}, [1, "7"], [[1]], [None], list(range(100_000)), 10**30, -1


def _end_token(value: Any) -> Case:
    return lambda folder: (folder / GENERATION).write_text(json.dumps({"eos_token_id": value}))


# -- safetensors


def _headers() -> dict[str, bytes]:
    def of(entry: Any, name: str = "wte.weight") -> bytes:
        raw = json.dumps({name: entry}).encode()
        return struct.pack("<Q", len(raw)) + raw + bytes(64)

    good = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}
    return {
        "a length beyond the file": struct.pack("<Q", 1 << 20) + b"{}",
        "the largest length": b"\xff" * 8 + b"{}",
        "no length": b"abc",
        "a length of 0": bytes(16),
        "not JSON": struct.pack("<Q", 4) + b"nope",
        "deep": struct.pack("<Q", DEEP) + b"[" * DEEP,
        "a list": struct.pack("<Q", 2) + b"[]",
        "no tensors": of({}, "__metadata__"),
        "a tensor that is a number": of(7),
        "a tensor without a type": of({k: v for k, v in good.items() if k != "dtype"}),
        "a type that is a list": of({**good, "dtype": ["F32"]}),
        "float offsets": of({**good, "data_offsets": [0.0, 64.0]}),
        "one offset": of({**good, "data_offsets": [64]}),
        "offsets backwards": of({**good, "data_offsets": [64, 0]}),
        "offsets beyond the file": of({**good, "data_offsets": [64, 128]}),
        "offsets below 0": of({**good, "data_offsets": [-64, 0]}),
        "offsets of 1e300": of({**good, "data_offsets": [0, 10**300]}),
        "a float shape": of({**good, "shape": [4.0, 4.0]}),
        "a shape below 0": of({**good, "shape": [-4, -4]}),
        "a shape of 1000 axes": of({**good, "shape": [1] * 1000}),
        "a shape that overflows": of({**good, "shape": [1 << 40, 1 << 40]}),
        "another shape than the configuration's": of(good),
    }


def _header(raw: bytes) -> Case:
    return lambda folder: (folder / WEIGHTS).write_bytes(raw)


def _indexes() -> tuple[tuple[str, Any], ...]:
    def of(name: Any) -> Any:
        return {"weight_map": {"wte.weight": name}}

    return (
        ("no weight_map", {}),
        ("a weight_map that is a list", {"weight_map": ["a"]}),
        ("an empty one", {"weight_map": {}}),
        ("a name that is a number", of(7)),
        ("a name that is a list", of(["a"])),
        ("a path to above", of("../../../etc/passwd")),
        ("an absolute path", of("/dev/zero")),
        ("a name with a NUL", of("a\0b")),
        ("a name that is no text", of("\ud800")),
        ("a name of 10000 characters", of("a" * 10_000)),
        ("a file that is not there", of("missing.safetensors")),
        ("100000 files", {"weight_map": {str(n): f"{n}.safetensors" for n in range(100_000)}}),
    )


# -- tokenizer.json


def _tokenizers() -> dict[str, Callable[[dict[str, Any]], object]]:
    def put(**parts: Any) -> Callable[[dict[str, Any]], object]:
        return lambda tokenizer: tokenizer.update(parts)

    def replace(content: str, pattern: Any = None) -> dict[str, Any]:
        return {"type": "Replace", "pattern": pattern or {"String": "a"}, "content": content}

    def bomb(count: int) -> dict[str, Any]:
        return {"type": "Sequence", "normalizers": [replace("a" * 10) for _ in range(count)]}

    def model(**parts: Any) -> Callable[[dict[str, Any]], object]:
        return lambda tokenizer: tokenizer["model"].update(parts)

    strip = {"type": "Strip", "content": "t", "start": 0, "stop": 5}
    return {
        "a normalizer that expands": put(normalizer=replace("b" * 1_000_000)),
        "normalizers that expand together": put(normalizer=bomb(30)),
        "normalizers that expand in a sequence in a sequence": put(
            normalizer={"type": "Sequence", "normalizers": [bomb(2), bomb(2)]}
        ),
        "an empty match that expands": put(normalizer=replace("b" * 1000, {"Regex": "x*"})),
        "a decoder that expands": put(decoder={"type": "Sequence", "decoders": [replace("a" * 100)]}),
        "a decoder that panics": put(decoder=strip),
        "a normalizer of no type": put(normalizer={"type": "Nothing"}),
        "a regular expression that is none": put(normalizer=replace("b", {"Regex": "(("})),
        "a regular expression that repeats": put(normalizer=replace("b", {"Regex": "((a{1000}){1000}){1000}"})),
        "no model": lambda tokenizer: tokenizer.pop("model"),
        "a model of no type": put(model={"type": "Nothing"}),
        "a huge id": model(vocab={"a": 4_000_000_000}),
        "a negative id": model(vocab={"a": -1}),
        "a float id": model(vocab={"a": 1.5}),
        "merges of what is not there": model(merges=["q zz"]),
        "a vocabulary that is a list": model(vocab=["a"]),
        "an added token of a huge id": put(added_tokens=[_added(4_000_000_000)]),
        "an added token of no text": put(added_tokens=[_added(0, "")]),
        "a truncation below 0": put(truncation={"max_length": -1, "strategy": "LongestFirst", "stride": 0}),
    }


def _added(number: int, content: str = "<x>") -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": True, **flags}


def _tokenizer(change: Callable[[dict[str, Any]], object]) -> Case:
    def case(folder: Path) -> None:
        tokenizer = json.loads((folder / TOKENIZER).read_text())
        change(tokenizer)
        (folder / TOKENIZER).write_text(json.dumps(tokenizer))

    return case


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 30 else text[:27] + ".."
