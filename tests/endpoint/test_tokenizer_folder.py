"""Special tokens of a folder are those that transformers' AutoTokenizer (5.23) finds, in whichever file they stand."""

import json
from pathlib import Path
from typing import Any

import pytest
from endpoint.harness import make_tokenizer
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from orca_common.errors import FailedPrecondition
from orca_endpoint.text.chat_template import read_chat_template
from orca_endpoint.text.tokenizer_folder import DEFAULTS, STANDARD, TokenizerFolder
from orca_endpoint.text.vocabulary import Vocabulary

PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast"}
TOOL = {
    "content": "<tool>",
    "lstrip": False,
    "normalized": False,
    "rstrip": False,
    "single_word": False,
    "special": True,
}
TYPED = {"__type": "AddedToken", **TOOL}
WORD = TOOL | {"content": "<word>", "special": False, "normalized": True}
STRIPS = TOOL | {"content": "<strips>", "lstrip": True, "rstrip": True}
FOLDERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "config": {"tokenizer_config.json": PLAIN | {"bos_token": "<s>", "eos_token": TYPED | {"content": "</s>"}}},
    "map alone": {"tokenizer_config.json": PLAIN, "special_tokens_map.json": {"bos_token": "<s>", "eos_token": TOOL}},
    "map wins": {
        "tokenizer_config.json": PLAIN | {"bos_token": "<a>"},
        "special_tokens_map.json": {"bos_token": "<b>"},
    },
    "map behind a decoder": {
        "tokenizer_config.json": PLAIN | {"added_tokens_decoder": {"320": TOOL}},
        "special_tokens_map.json": {"bos_token": "<s>"},
    },
    "decoder": {"tokenizer_config.json": PLAIN | {"added_tokens_decoder": {"320": TOOL, "321": WORD, "322": STRIPS}}},
    "own names": {"tokenizer_config.json": PLAIN | {"foo_token": "<foo>", "image_token": "<image>"}},
    "own names in an object": {"tokenizer_config.json": PLAIN | {"extra_special_tokens": {"foo_token": "<foo>"}}},
    "a list": {"tokenizer_config.json": PLAIN | {"extra_special_tokens": ["<tool>", "<two>"]}},
    "an older list": {
        "tokenizer_config.json": PLAIN | {"additional_special_tokens": ["<tool>", TYPED | {"content": "<two>"}]}
    },
    "added tokens": {
        "tokenizer_config.json": PLAIN | {"bos_token": "<tool>"},
        "added_tokens.json": {"<tool>": 320, "<word>": 321},
    },
}
TEXT = "a <tool> b <word>c <strips> d<two> <foo><image></s>"


def write(folder: Path, files: dict[str, Any]) -> None:
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))


@pytest.mark.parametrize("name", FOLDERS)
def test_named_tokens_and_ids_are_those_of_autotokenizer(tmp_path: Path, name: str) -> None:
    write(tmp_path, {"tokenizer_config.json": PLAIN} | FOLDERS[name])
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    mine = TokenizerFolder(tmp_path)
    assert {token: text for token, text in mine.named.items() if token in STANDARD} == {
        token: text for token, text in theirs.special_tokens_map.items() if isinstance(text, str) and token in STANDARD
    }
    for token in mine.named.keys() - STANDARD:
        assert mine.named[token] == getattr(theirs, token)
    assert Vocabulary(tmp_path / "tokenizer.json").encode(TEXT) == theirs(TEXT)["input_ids"]


@pytest.mark.parametrize("kind", DEFAULTS)
def test_a_class_has_defaults(tmp_path: Path, kind: str) -> None:
    import transformers

    write(tmp_path, {"tokenizer_config.json": {"tokenizer_class": kind + "Fast"}})
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))  # of bytes it would be no Llama's
    theirs = getattr(transformers, kind)()
    right = {token: str(text) for token, text in theirs.special_tokens_map.items() if token in STANDARD}
    assert TokenizerFolder(tmp_path).named == right


@pytest.mark.parametrize("given", [None, "PreTrainedTokenizerFast", "LlamaTokenizerFast"])
@pytest.mark.parametrize("model", ["gpt2", "gptj", "gpt_neox", "llama", "mistral", "qwen2", "qwen3"])
def test_which_class_it_is(tmp_path: Path, model: str, given: str | None) -> None:
    """Of a model_type, where no file says it; Qwen 2's and Mistral's whatever a file says; no Llama's of bytes."""
    write(tmp_path, {"tokenizer_config.json": {"tokenizer_class": given} if given else {}})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    right = {token: str(text) for token, text in theirs.special_tokens_map.items() if token in STANDARD}
    assert TokenizerFolder(tmp_path).named == right


def test_a_template_sees_them(tmp_path: Path) -> None:
    """`[user]hi` was rendered in place of `<s>[user]hi</s>`."""
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ foo_token }}{% endfor %}{{ eos_token }}"
    )
    files = {
        "tokenizer_config.json": PLAIN | {"chat_template": source, "foo_token": "<foo>"},
        "special_tokens_map.json": {"bos_token": "<s>", "eos_token": TOOL | {"content": "</s>"}},
    }
    write(tmp_path, files)
    template, messages = read_chat_template(tmp_path), [{"role": "user", "content": "hi"}]
    assert template is not None
    right = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, tokenize=False)
    assert template.render(messages, {}, 100) == right == "<s>[user]hi<foo></s>"


@pytest.mark.parametrize("wrong", [5, {"content": 5}, None])
def test_a_wrong_token_is_refused(tmp_path: Path, wrong: Any) -> None:
    write(tmp_path, {"tokenizer_config.json": {"added_tokens_decoder": {"320": wrong}}})
    with pytest.raises(FailedPrecondition, match=r"added_tokens_decoder holds .*, which is no token"):
        TokenizerFolder(tmp_path)
