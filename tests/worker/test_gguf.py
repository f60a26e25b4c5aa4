"""GGUF files: the numbers of llama.cpp's own library, the tokens of the same numbers in safetensors, refusals."""

import json
import random
import re
import struct
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_shape
from fuzz.mutations import mutated
from gguf_files import gguf, make_gguf
from properties import PART, covering
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from worker.company import check_any_company
from worker.driver import Sampled, TinyEngine, make_stage
from worker.engines import in_process
from worker.test_quantize import Oracle, check_tokens

from orca_common.checkpoint import read_checkpoint, resolve_model
from orca_common.errors import FailedPrecondition
from orca_common.gguf import tokenizer
from orca_common.gguf.folder import made
from orca_common.gguf.header import BY_NAME, MAX_ITEMS, gguf_header
from orca_common.gguf.tokenizer import PATTERNS, SPACE
from orca_kernels.cpu.library import instruction_sets
from orca_worker.models.families import check_weights, layout_sentence, topology
from orca_worker.models.formats.blocks import numbers
from orca_worker.models.llama.configuration import LlamaConfig
from orca_worker.models.weight_files import fingerprint
from orca_worker.partition import Types

TOOLS = Path(__file__).with_name("data") / "blocks.gguf"
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.mark.parametrize("kind", BY_NAME)
def test_the_numbers_of_ggufs_own_library(kind: str) -> None:
    header, raw = gguf_header(TOOLS), bytearray(TOOLS.read_bytes())

    def tensor(name: str, kind: str) -> torch.Tensor:
        at = header.tensors[name]
        of = torch.frombuffer(raw, dtype=torch.uint8, count=at.size, offset=at.start)
        return numbers(of.view(at.shape[0], -1, BY_NAME[kind].bytes), kind)

    assert header.tensors[kind].kind == kind
    assert torch.equal(tensor(kind, kind), tensor(f"{kind}.expected", "F32"))


def both(tmp_path: Path, shape: str, kinds: dict[str, str], **config: Any) -> tuple[Path, Path]:
    """A GGUF file, and the same numbers in safetensors."""
    folder = make_shape(tmp_path / "floats", shape, **(SIZES | config))
    file = tmp_path / "a-model.gguf"
    found = make_gguf(folder, file, kinds)
    save_file(found, folder / "model.safetensors")
    return file, folder


def requests_for(count: int) -> list[Sampled]:
    chance = random.Random(5)
    return [Sampled([chance.randrange(210) for _ in range(chance.randint(1, 20))], 6) for _ in range(count)]


def tokens_of(folder: Path, quantize: str | None = None) -> list[list[int]]:
    requests = requests_for(9)
    TinyEngine(make_stage(folder, 400, 16, quantize=quantize), 400, 16).run(requests)
    return [request.made for request in requests]


MIXED = {"": "Q8_0", "attn_v": "F16", "ffn_down": "Q4_0", "output": "BF16", "token_embd": "Q8_0"}
SHAPES = (
    ("llama, 2 K/V heads", {}),
    ("llama, tied, biases, 1 K/V head, large heads", {"mlp_bias": False, "hidden_act": "silu", "head_dim": 32}),
    ("qwen2, a window in the upper layer", {"use_sliding_window": False}),
    ("qwen3, large heads", {"head_dim": 32}),
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orca_common.gguf.folder.cache", lambda: tmp_path / "cache")


@pytest.mark.parametrize(("shape", "config"), SHAPES)
def test_tokens_are_those_of_the_same_numbers(tmp_path: Path, shape: str, config: dict[str, Any]) -> None:
    """Of a file alone, whose fields become a configuration; quantized when it is loaded, too."""
    file, floats = both(tmp_path, shape, MIXED, **config)
    folder = resolve_model(str(file))
    assert folder == resolve_model(str(file.parent))
    assert read_checkpoint(folder).name == "a-model"
    mine, theirs = (LlamaConfig.read(read_checkpoint(one)) for one in (folder, floats))
    assert mine == theirs
    assert tokens_of(folder) == tokens_of(floats)
    assert tokens_of(folder, "int4") == tokens_of(floats, "int4")
    check_weights(read_checkpoint(folder))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize(("shape", "config"), SHAPES)
def test_blocks_stay_codes(tmp_path: Path, shape: str, config: dict[str, Any], kind: str) -> None:
    """Of a file whose matrices have one type: they multiply activations in eight bits, in the kernels as in torch."""
    file, floats = both(tmp_path, shape, {"": kind, "token_embd": "Q8_0"}, **config)
    folder, requests = resolve_model(str(file)), list[Sampled]()
    for kernels in ("auto", "torch"):
        requests += (new := requests_for(12))
        TinyEngine(make_stage(folder, 800, 16, kernels=kernels), 800, 16).run(new)
    check_tokens(Oracle(floats, 1, None), requests)
    assert layout_sentence(read_checkpoint(folder)) == "GGUF, " + " and ".join(sorted({"F32", "Q8_0", kind}))
    of = topology(read_checkpoint(folder), 1, 1, Types.of("float32"))[0]
    sizes = {name: part.elements for name, part in of.slices.items()}
    matrices = sum(size for name, size in sizes.items() if name.endswith("_proj.weight"))
    assert of.weight_bytes == matrices // 32 * BY_NAME[kind].bytes + 4 * (sum(sizes.values()) - matrices)


async def test_blocks_on_two_tensor_ranks(tmp_path: Path) -> None:
    file, floats = both(tmp_path, "llama, 2 K/V heads", {"": "Q8_0"}, intermediate_size=192)
    async with in_process(resolve_model(str(file)), 2, 1, slots=600) as (master, _):
        requests = requests_for(8)
        await master.run(requests)
    check_tokens(Oracle(floats, 2, None), requests)


@pytest.mark.parametrize(("kernels", "kind"), covering(instruction_sets(), ("Q8_0", "Q4_0"), strength=1))
def test_the_same_bits_in_any_company(tmp_path: Path, logits: list[Tensor], kernels: str, kind: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 288, "head_dim": 40}
    file, _ = both(tmp_path, "llama, 2 K/V heads", {"": kind}, **sizes)
    chance = random.Random(2)
    prompts = [[chance.randrange(211) for _ in range(chance.randint(1, 50))] for _ in range(20)]
    requests = [Sampled(prompt, 4, {"logprobs": True}) for prompt in prompts]
    check_any_company(resolve_model(str(file)), logits, kernels, "bfloat16", requests)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 2)])
async def test_several_ranks(tmp_path: Path, tp: int, pp: int) -> None:
    """A rank's inputs begin within a block: 160 / 2 of `ffn_down`."""
    file, floats = both(tmp_path, "llama, 2 K/V heads", MIXED)
    made = []
    for folder in (resolve_model(str(file)), floats):
        async with in_process(folder, tp, pp, slots=600) as (master, _):
            requests = requests_for(8)
            await master.run(requests)
        made.append([request.made for request in requests])
    assert made[0] == made[1]


def test_a_configuration_beside_the_file_wins(tmp_path: Path) -> None:
    file, floats = both(tmp_path, "mistral, a window", {"": "Q8_0"})
    (floats / "model.safetensors").unlink()
    file.rename(floats / "model.gguf")
    assert resolve_model(str(floats)) == floats
    stage = make_stage(floats, 400, 16)
    assert stage.form(16)
    (floats / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(FailedPrecondition, match=r"holds 2 files in GGUF \(model.gguf, other.gguf\)"):
        check_weights(read_checkpoint(floats))


def test_files_beside_it_are_read_within_bounds(tmp_path: Path) -> None:
    """Their bytes are nowhere taken without the check that each file of a checkpoint has: one may be a device."""
    file, _ = both(tmp_path, "llama, 2 K/V heads", {"": "Q8_0"})
    (file.parent / "generation_config.json").symlink_to("/dev/null")
    with pytest.raises(FailedPrecondition, match=r"generation_config.json is not a regular file"):
        read_checkpoint(resolve_model(str(file)))


def test_a_file_that_is_put_beside_it_later_is_taken(tmp_path: Path) -> None:
    file, _ = both(tmp_path, "llama, 2 K/V heads", {"": "Q8_0"})
    assert not (resolve_model(str(file)) / "chat_template.jinja").exists()
    (file.parent / "chat_template.jinja").write_text("of the user")
    assert (resolve_model(str(file)) / "chat_template.jinja").read_text() == "of the user"


def test_the_fingerprint_covers_the_tensors(tmp_path: Path) -> None:
    file, _ = both(tmp_path, "llama, 2 K/V heads", {"": "Q8_0"})
    before = fingerprint(folder := resolve_model(str(file)))
    raw = bytearray(file.read_bytes())
    raw[gguf_header(file).tensors["blk.1.ffn_up.weight"].start + 5] ^= 1
    file.write_bytes(raw)
    assert fingerprint(folder) != before


def test_llama3s_positions(tmp_path: Path) -> None:
    """The file has what the frequencies are divided by, as llama.cpp's converter writes it."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config: Any = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    folder = make_shape(tmp_path / "floats", "llama, 2 K/V heads", **SIZES, **config, max_position_embeddings=16384)
    of: Any = AutoConfig.from_pretrained(folder)
    frequencies = ROPE_INIT_FUNCTIONS["llama3"](of, torch.device("cpu"))[0]
    plain = 1.0 / 5e5 ** (torch.arange(0, 16, 2).float() / 16)
    divisors = (plain / frequencies).numpy().astype(np.float32)
    file = tmp_path / "m.gguf"
    make_gguf(folder, file, {"": "Q8_0"})
    whole = rewritten(file, lambda tensors: tensors.update({"rope_freqs.weight": (0, (8,), divisors.tobytes())}))
    mine, theirs = (LlamaConfig.read(read_checkpoint(one)) for one in (resolve_model(str(whole)), folder))
    assert mine == theirs
    strange = divisors * 2
    whole = rewritten(file, lambda tensors: tensors.update({"rope_freqs.weight": (0, (8,), strange.tobytes())}))
    with pytest.raises(FailedPrecondition, match=r"rope_freqs.weight divides frequency 0 by 2; Llama 3.1's would be 1"):
        resolve_model(str(whole))
    zero = rewritten(whole, lambda tensors: None, llama__rope__freq_base=0.0)
    with pytest.raises(FailedPrecondition, match=r"rope.freq_base is 0.0, not above 0"):
        resolve_model(str(zero))


def rewritten(file: Path, change: Callable[[dict[str, Any]], object], **fields: Any) -> Path:
    """Another file with other tensors or fields; None takes a field away."""
    header, raw = gguf_header(file), file.read_bytes()
    kinds = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "BF16": 30}
    tensors = {n: (kinds[t.kind], t.shape, raw[t.start : t.start + t.size]) for n, t in header.tensors.items()}
    change(tensors)
    of = {name.replace("__", "."): value for name, value in fields.items()}
    kept = {name: value for name, value in (header.fields | of).items() if value is not None}
    other = file.with_name(f"changed-{len(list(file.parent.glob('*.gguf')))}.gguf")
    other.write_bytes(gguf(kept, tensors))
    return other


# -- vocabularies

TEXTS = ("def f(x):\n    return  x + 12345\n", "grüße, 世界! don't  WE'LL\t\n\n  1999", "", " a", "a<|end|>b", "😀 é")


def vocabulary(tokenizer: Tokenizer, kinds: dict[str, int]) -> dict[str, Any]:
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    return {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens]}


def read_back(tmp_path: Path, fields: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    shape = make_shape(tmp_path / "floats", "llama, 2 K/V heads", vocab_size=len(fields["tokenizer.ggml.tokens"]))
    make_gguf(shape, tmp_path / "m.gguf", {"": "F32"}, **fields)
    folder = resolve_model(str(tmp_path / "m.gguf"))
    return Tokenizer.from_file(str(folder / "tokenizer.json")), json.loads(
        (folder / "tokenizer_config.json").read_text()
    )


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_byte_level_vocabularies(tmp_path: Path, pre: str) -> None:
    pattern = PATTERNS[pre]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    cut = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    whole = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    whole.pre_tokenizer = pre_tokenizers.Sequence([*cut, level])
    whole.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    whole.train_from_iterator([Path(__file__).read_text()], trainer)
    merges = [" ".join(merge) for merge in json.loads(whole.to_str())["model"]["merges"]]
    fields = {
        **vocabulary(whole, dict.fromkeys(special, 3)),
        **{"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": merges},
        **{"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1, "tokenizer.chat_template": "{{ 1 }}"},
        "tokenizer.ggml.add_bos_token": pre == "qwen2",
    }
    found, config = read_back(tmp_path, fields)
    assert config == {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": "{{ 1 }}"}
    for text in TEXTS:
        ids = found.encode(text).ids
        assert ids[:1] == [0] if pre == "qwen2" else ids[:1] != [0]
        assert found.encode(text, add_special_tokens=False).ids == whole.encode(text).ids
        assert found.decode(ids, skip_special_tokens=False).removeprefix("<|begin|>") == text


def test_sentencepieces_vocabulary(tmp_path: Path) -> None:
    """The scores are the order of the merges."""
    control = ["<unk>", "<s>", "</s>"]
    whole = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    whole.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    some = [*control, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=some, show_progress=False)
    whole.train_from_iterator([Path(__file__).read_text()[:20000]], trainer)
    merged = json.loads(whole.to_str())["model"]["merges"]
    order = {left + right: i for i, (left, right) in enumerate(merged)}
    fields = vocabulary(whole, {**dict.fromkeys(some, 6), **dict.fromkeys(control, 3), "<unk>": 2})
    fields["tokenizer.ggml.scores"] = [-float(order.get(token, 0)) for token in fields["tokenizer.ggml.tokens"]]
    fields |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    found, _ = read_back(tmp_path, fields | {"tokenizer.ggml.unknown_token_id": 0})
    # The trainer made the bytes special, so that they are cut from a text; in a file they are plain tokens.
    plain = json.loads(whole.to_str())
    plain["added_tokens"] = plain["added_tokens"][:3]
    whole = Tokenizer.from_str(json.dumps(plain))
    for text in TEXTS:
        ids = found.encode(text).ids
        assert ids == [1, *whole.encode(text).ids]
        assert found.decode(ids) == text


# -- files that are wrong

WRONG: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("", {"general__architecture": "bert"}, r"general.architecture is 'bert'; Orca reads llama, qwen2, qwen3 in GGUF"),
    ("", {"llama__expert_count": 8}, "llama.expert_count asks for a mixture of experts"),
    ("", {"llama__block_count": None}, "it lacks the field llama.block_count"),
    ("", {"llama__block_count": 9}, "it lacks blk.2.attn_q.weight"),
    ("", {"llama__attention__head_count": [4, 4]}, "llama.attention.head_count has a number for each layer"),
    ("", {"llama__embedding_length": 128}, r"token_embd.weight is \[211, 64\], the configuration says \[211, 128\]"),
    ("", {"llama__rope__freq_base": float("nan")}, "'llama.rope.freq_base' is nan"),
    ("", {"split__count": 3}, "it is one of several parts of a model"),
    ("", {"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__tokens": ["a", "a"]}, "has a token twice"),
    ("", {"tokenizer__ggml__eos_token_id": [1]}, "eos_token_id"),
    (
        "",
        {"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__tokens": ["a"]}
        | {"tokenizer__ggml__merges": [], "tokenizer__ggml__pre": ["gpt-2"]},
        "tokenizer.ggml.pre is a list",
    ),
    ("token_embd.weight", {}, "it lacks token_embd.weight"),
    ("blk.1.ffn_up.weight", {}, "it lacks blk.1.ffn_up.weight"),
)


@pytest.mark.parametrize(("gone", "fields", "part"), WRONG)
def test_what_a_file_lacks_is_named(tmp_path: Path, gone: str, fields: dict[str, Any], part: str) -> None:
    file, _ = both(tmp_path, "llama, 2 K/V heads", {"": "Q8_0"})
    wrong = rewritten(file, lambda tensors: gone and tensors.pop(gone), **fields)
    with pytest.raises(FailedPrecondition, match=rf"^model: {re.escape(str(wrong.parent))}.*{part}"):
        make_stage(resolve_model(str(wrong)), 400, 16)


def changed(raw: bytes, name: bytes, form: str, value: int, behind: int = 0) -> bytes:
    """The bytes with another number `behind` bytes after a name."""
    at = raw.index(name) + len(name) + behind
    return raw[:at] + struct.pack(form, value) + raw[at + struct.calcsize(form) :]


def test_headers_that_lie_are_refused(tmp_path: Path) -> None:
    file, _ = both(tmp_path, "llama, 2 K/V heads", {"": "Q8_0"})
    raw = file.read_bytes()
    up = b"blk.1.ffn_up.weight"
    for lying, part in (
        (b"GGML" + raw[4:], "begins with b'GGML'"),
        (raw[:4] + struct.pack(">I", 3) + raw[8:], "version 50331648; 2 and 3 are read"),
        (raw[:8] + struct.pack("<Q", 1 << 40) + raw[16:], "tensors and .* fields; at most 65536"),
        (raw[: len(raw) - 40], "ends at byte"),
        (changed(raw, up, "<I", 9), "'blk.1.ffn_up.weight' has 9 axes, not 1 to 4"),
        (changed(raw, up, "<Q", 65, 4), r"of type Q8_0 has the shape \[160, 65\]"),
        (changed(raw, up, "<Q", 1 << 50, 12), r"of type Q8_0 has the shape \[1125899906842624, 64\]"),
        (changed(raw, up, "<I", 20, 20), "has the type IQ4_NL; Orca reads F32, F16, Q4_0, Q8_0, Q4_K, Q6_K, BF16"),
        (changed(raw, up, "<Q", 33, 24), "begins at byte 33, which is no multiple of 32"),
        (changed(raw, up, "<Q", 40, 24), "begins at byte 40, which is no multiple of 32"),
        (changed(raw, up, "<Q", 0, 24), "begins at byte 0, within"),
        (changed(raw, up, "<Q", 1 << 60, 24), "ends at byte"),
        (changed(raw, b"general.architecture", "<Q", 1 << 62, 4), "has .* bytes; at most"),
        (changed(raw, b"general.architecture", "<I", 77), "'general.architecture' has the type 77"),
    ):
        file.write_bytes(lying)
        with pytest.raises(FailedPrecondition, match=rf"^model: {re.escape(str(file))} cannot be read \(.*{part}"):
            gguf_header(file)


def test_small_files_make_no_process_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers take 16 times their bytes in Python's lists, and tokens of few letters have millions of merges."""
    file, count = tmp_path / "m.gguf", MAX_ITEMS // 2 + 1
    numbers_of = b"".join(struct.pack("<QcIIQ", 1, name, 9, 0, count) + bytes(count) for name in (b"a", b"b"))
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + numbers_of)
    with pytest.raises(FailedPrecondition, match=f"'b' has {count} items; at most {MAX_ITEMS} of all fields"):
        gguf_header(file)
    monkeypatch.setattr(tokenizer, "MERGES", 100)
    words = ["", *("".join(letters) for n in range(1, 6) for letters in product("ab", repeat=n))]
    fields = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": words}
    file.write_bytes(gguf(fields | {"tokenizer.ggml.scores": [0.0] * len(words)}, {}))
    with pytest.raises(FailedPrecondition, match="more than 100 merges"):
        tokenizer.tokenizer(file, gguf_header(file))


COUNT = 3000 if PART > 1 else 100_000


def test_changed_files_are_read_or_refused(tmp_path: Path) -> None:
    """Files are cut short, have other bytes, or pieces that come twice. All that is read lies within the file."""
    words = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "a", "b", "ab"]}
    fields = {"general.architecture": "llama", "llama.context_length": 64, "llama.block_count": 1, **words}
    sizes = {"llama.embedding_length": 32, "llama.feed_forward_length": 32, "llama.attention.head_count": 4}
    tensors = {
        "token_embd.weight": (8, (4, 32), bytes(136)),
        "rope_freqs.weight": (0, (4,), struct.pack("<4f", *[1] * 4)),
    }
    raws = [gguf(fields | sizes | {"tokenizer.ggml.scores": [0.0, -1.0, -2.0, -3.0]}, tensors), gguf({}, {})]
    chance, file, read = random.Random(1), tmp_path / "m.gguf", 0
    for _ in range(COUNT):
        raw = (
            mutated(chance.choice(raws), raws, chance)
            if chance.random() < 0.9
            else raws[0][: chance.randrange(len(raws[0]))]
        )
        file.unlink(missing_ok=True)  # a file that is cut to nothing is flushed by some file systems
        file.write_bytes(raw)
        with suppress(FailedPrecondition):  # and nothing else
            header = gguf_header(file)
            assert all(one.start >= 0 and one.start + one.size <= len(raw) for one in header.tensors.values())
            json.dumps(made(file, header), allow_nan=False)
            read += 1
    assert 0 < read < COUNT
