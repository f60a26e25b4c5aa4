"""The vocabulary of a GGUF file as a tokenizer.json: byte-level BPE ("gpt2"), and SentencePiece's BPE ("llama").

The file has the pattern that cuts a text into words by a name (`tokenizer.ggml.pre`); those of the families in Llama's
shape are here. SentencePiece's scores say in which order pieces are merged, as transformers' converter has it
(integrations/ggml.py).
"""

from pathlib import Path
from typing import Any

from ..bounded_file import shown
from .header import Gguf, broken

MERGES = 1 << 21  # that SentencePiece's tokens may have; Gemma's 256,000 have 580,000
CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The pattern of each name; None: GPT-2's own.
PATTERNS = {
    "gpt-2": None,
    "default": None,
    "llama-bpe": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST,
    "qwen2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST,
}
SPACE = "\u2581"  # SentencePiece's


def tokenizer(file: Path, of: Gguf) -> dict[str, Any] | None:
    """tokenizer.json; None where the file has no vocabulary. Raises FailedPrecondition."""
    fields = {name.removeprefix("tokenizer.ggml."): value for name, value in of.fields.items()}
    kind, tokens = fields.get("model", "none"), fields.get("tokens")
    if kind in ("none", "no_vocab") or tokens is None:
        return None
    if kind not in ("gpt2", "llama"):
        raise broken(file, f"tokenizer.ggml.model is {shown(kind)}; Orca reads gpt2 and llama")
    vocab = {token: i for i, token in enumerate(_texts(file, "tokens", tokens))}
    if len(vocab) != len(tokens):
        raise broken(file, "tokenizer.ggml.tokens has a token twice")
    types = fields.get("token_type") or [1] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise broken(file, "tokenizer.ggml.token_type has not a number for each token")
    added = [
        {
            **{"id": i, "content": token, "special": types[i] == CONTROL, "normalized": False},
            **{"single_word": False, "lstrip": False, "rstrip": False},
        }
        for token, i in vocab.items()
        if types[i] in (CONTROL, USER_DEFINED) and token
    ]
    made = (_byte_level if kind == "gpt2" else _sentencepiece)(file, fields, vocab)
    return {
        **{"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **made},
        "post_processor": _post_processor(file, fields, kind, tokens),
    }


def _texts(file: Path, name: str, given: object) -> list[str]:
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise broken(file, f"tokenizer.ggml.{name} is no list of texts")
    return given


def _byte_level(file: Path, fields: dict[str, Any], vocab: dict[str, int]) -> dict[str, Any]:
    pre = fields.get("pre", "default")
    if not isinstance(pre, str) or pre not in PATTERNS:
        known = ", ".join(PATTERNS)
        problem = f"tokenizer.ggml.pre is {shown(pre)}; Orca knows {known}. A tokenizer.json beside the file is taken"
        raise broken(file, problem)
    merges = _texts(file, "merges", fields.get("merges"))
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not (left in vocab and right in vocab and left + right in vocab):
            raise broken(file, f"tokenizer.ggml.merges has {shown(merge)}, which are no tokens")
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    pattern = PATTERNS[pre]
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    words = [cut, {**level, "use_regex": False}]
    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {**level, "use_regex": True}
        if pattern is None
        else {"type": "Sequence", "pretokenizers": words},
        "decoder": {**level, "use_regex": False},
        "model": _bpe(vocab, merges, ignore_merges=pre == "llama-bpe"),
    }


def _sentencepiece(file: Path, fields: dict[str, Any], vocab: dict[str, int]) -> dict[str, Any]:
    scores = fields.get("scores")
    if not isinstance(scores, list) or len(scores) != len(vocab) or not all(isinstance(one, float) for one in scores):
        raise broken(file, "tokenizer.ggml.scores has not a number for each token")
    unknown = fields.get("unknown_token_id", 0)
    names = list(vocab)
    if type(unknown) is not int or not 0 <= unknown < len(names):
        raise broken(file, f"tokenizer.ggml.unknown_token_id is {shown(unknown)}")
    merges = []
    for token, i in vocab.items():
        cuts = ((token[:at], token[at:]) for at in range(1, min(len(token), 64)))
        pairs = [(vocab[left], vocab[right]) for left, right in cuts if left in vocab and right in vocab]
        merges += [(-scores[i], i, *pair) for pair in sorted(pairs)]
        if len(merges) > MERGES:
            raise broken(file, f"tokenizer.ggml.tokens has more than {MERGES} merges")
    merges.sort(key=lambda merge: merge[:2])
    prefix = [{"type": "Prepend", "prepend": SPACE}] if fields.get("add_space_prefix", True) else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    replaced = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*prefix, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [replaced, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": {
            **_bpe(vocab, [[names[left], names[right]] for _, _, left, right in merges]),
            **{"unk_token": names[unknown], "fuse_unk": True, "byte_fallback": True},
        },
    }


def _bpe(vocab: dict[str, int], merges: list[Any], *, ignore_merges: bool = False) -> dict[str, Any]:
    return {
        **{"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None},
        **{"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": ignore_merges},
        **{"vocab": vocab, "merges": merges},
    }


def _post_processor(file: Path, fields: dict[str, Any], kind: str, tokens: list[str]) -> dict[str, Any] | None:
    """Puts the first token before a text, where the file says so, or leaves it to its kind."""
    if not fields.get("add_bos_token", kind == "llama" or fields.get("pre") == "llama-bpe"):
        return None
    first = fields.get("bos_token_id", 1 if kind == "llama" else None)
    if first is None:
        return None
    if type(first) is not int or not 0 <= first < len(tokens):
        raise broken(file, f"tokenizer.ggml.bos_token_id is {shown(first)}")
    special, text = {"SpecialToken": {"id": tokens[first], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        **{"type": "TemplateProcessing", "single": [special, text], "pair": [special, text, second]},
        "special_tokens": {tokens[first]: {"id": tokens[first], "ids": [first], "tokens": [tokens[first]]}},
    }
