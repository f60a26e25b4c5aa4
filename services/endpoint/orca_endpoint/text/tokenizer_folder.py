"""Reads the special tokens that a checkpoint names beside tokenizer.json, as transformers' AutoTokenizer does.

tokenizer_config.json     named tokens (`bos_token`, others too), `extra_special_tokens`, `added_tokens_decoder`
special_tokens_map.json   the same, by older transformers; it holds where the first has no `added_tokens_decoder`
added_tokens.json         ids of tokens, by still older ones; likewise
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from orca_common.bounded_file import json_object, read_bounded, shown
from orca_common.checkpoint import TOKENIZER_BYTES
from orca_common.errors import FailedPrecondition

CONFIG_BYTES = 16 << 20  # it lists all added tokens
STANDARD = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Named tokens of a class where no file names them (transformers 5.23); `Fast` behind a name changes nothing.
END = "<|endoftext|>"
GPT2 = {"bos_token": END, "eos_token": END, "unk_token": END}
T5 = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
DEFAULTS: dict[str, dict[str, str]] = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GPT2Tokenizer": GPT2,
    "CodeGenTokenizer": GPT2,
    "GPTNeoXTokenizer": GPT2 | {"pad_token": "<|padding|>"},
    "Qwen2Tokenizer": {"eos_token": END, "unk_token": END, "pad_token": END},
    "GemmaTokenizer": {name: f"<{name[:-6]}>" for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    | {"mask_token": "<mask>"},
    "T5Tokenizer": T5,
}
# Of a model_type, where no file names a class.
CLASSES = {
    **{"gpt2": "GPT2Tokenizer", "gptj": "GPT2Tokenizer", "gpt_neox": "GPTNeoXTokenizer", "t5": "T5Tokenizer"},
    **{"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer", "gemma3_text": "GemmaTokenizer"},
}
NOT_BELIEVED = ("qwen2", "mistral")  # types of models whose files' class does not count
BYTE_LEVEL = re.compile(rb'"type"\s*:\s*"ByteLevel"')
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class TokenizerFolder:
    """The files of one folder, read once. Raises FailedPrecondition with a sentence for wrong ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config = self._read("tokenizer_config.json")
        added = self.config.get("added_tokens_decoder")
        self._map: Mapping[str, Any] = {}
        self._added: dict[str, Any] = {}  # of tokens by their texts: objects with FLAGS
        if isinstance(added, dict):
            for token in added.values():
                text = text_of(token)
                if text is None:
                    raise self._wrong("tokenizer_config.json", "added_tokens_decoder", token)
                self._added[text] = token
        else:
            self._map = self._read("special_tokens_map.json")
            special = {*self.named.values(), *self._extra}
            for text in self._read("added_tokens.json"):
                self._added[text] = {"content": text, "normalized": text not in special, "special": text in special}

    @property
    def named(self) -> dict[str, str]:
        """The named special tokens, which are variables of a chat template."""
        found = dict(DEFAULTS.get(self._class, {}))
        for given in (self.config, self._map):
            own = given.get("extra_special_tokens")
            for name, token in {**given, **(own if isinstance(own, dict) else {})}.items():
                text = text_of(token)
                if text is not None and (name.endswith("_token") or (isinstance(own, dict) and name in own)):
                    found[name] = text
                elif name in STANDARD and token is None:
                    found.pop(name, None)
        return found

    @property
    def _class(self) -> str:
        """The tokenizer's class, by the rules of AutoTokenizer: the files name one that it does not always believe."""
        model = self._read("config.json")
        type_of, given = model.get("model_type"), self.config.get("tokenizer_class") or model.get("tokenizer_class")
        if type_of in NOT_BELIEVED or not isinstance(given, str):
            return CLASSES.get(type_of, "") if isinstance(type_of, str) else ""
        kind = given.removesuffix("Fast")
        return "" if kind == "LlamaTokenizer" and self._is_of_bytes() else kind

    def _is_of_bytes(self) -> bool:
        with suppress(FileNotFoundError):
            return BYTE_LEVEL.search(read_bounded(self._folder / "tokenizer.json", TOKENIZER_BYTES)) is not None
        return False

    @property
    def added(self) -> list[AddedToken]:
        """The tokens that transformers adds to those of tokenizer.json, where that lacks them, in their order."""
        made = [
            AddedToken(text, **{name: bool(token[name]) for name in FLAGS if name in token})
            for text, token in self._added.items()
        ]
        special = dict.fromkeys([*self.named.values(), *self._extra])
        return [*made, *(AddedToken(text, special=True) for text in special if text not in self._added)]

    @property
    def _extra(self) -> list[str]:
        """Special tokens without a name."""
        found = list[str]()
        for given in (self.config, self._map):
            for name in ("extra_special_tokens", "additional_special_tokens"):
                several = given.get(name)
                if isinstance(several, list):
                    found += [text for token in several if (text := text_of(token)) is not None]
        return found

    def _read(self, name: str) -> dict[str, Any]:
        path = self._folder / name
        with suppress(FileNotFoundError):
            return json_object(read_bounded(path, CONFIG_BYTES), path)
        return {}

    def _wrong(self, file: str, name: str, value: object) -> FailedPrecondition:
        return FailedPrecondition(f"model: {self._folder / file}: {name} holds {shown(value)}, which is no token")


def text_of(token: Any) -> str | None:
    """The text of a token, which stands as it is or in an object; None: it is neither."""
    match token:
        case str() | {"content": str()}:
            return token if isinstance(token, str) else token["content"]
        case _:
            return None
