"""The parts of a checkpoint that a service reads: its digest, its end tokens."""

import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from orca_common.checkpoint import Checkpoint, read_checkpoint
from orca_common.errors import FailedPrecondition
from orca_local.stack import DEMO_MODEL

CONFIG = {"model_type": "gpt2", "vocab_size": 500, "n_positions": 256, "eos_token_id": 7}

Make = Callable[..., Checkpoint]


@pytest.fixture
def read(tmp_path: Path) -> Make:
    """Makes a checkpoint with changes, and reads it."""

    def made(generation: Any = None, tokenizer: str | None = "{}", **changes: Any) -> Checkpoint:
        for name, content in (
            ("config.json", json.dumps(CONFIG | changes)),
            ("generation_config.json", None if generation is None else json.dumps(generation)),
            ("tokenizer.json", tokenizer),
        ):
            (tmp_path / name).unlink(missing_ok=True)
            if content is not None:
                (tmp_path / name).write_text(content)
        return read_checkpoint(tmp_path)

    return made


@pytest.mark.parametrize(
    "change", [{"tokenizer": "{ }"}, {"tokenizer": None}, {"vocab_size": 501}, {"n_positions": 255}], ids=str
)
def test_the_digest_is_of_the_tokenizer_and_the_sizes(read: Make, change: dict[str, Any]) -> None:
    """Services whose digests differ do not work together: a text would be other tokens at the next one."""
    assert read(**change).digest != read().digest == read(eos_token_id=9, n_layer=3).digest


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({"eos_token_id": [8, 9]}, 7, (8, 9)),
        ({"eos_token_id": 8}, [7], (8,)),
        ({"temperature": 0.7}, [7, 6], (7, 6)),
        (None, 7, (7,)),
        ({"eos_token_id": None}, None, ()),
    ],
)
def test_the_end_tokens_are_those_of_the_generation(read: Make, generation: Any, config: Any, ids: Any) -> None:
    """A model that follows instructions has its own end tokens there; those of the config are of its pretraining."""
    assert read(generation, eos_token_id=config).eos_token_ids == ids


def test_an_end_token_beyond_the_vocabulary_is_left_out(read: Make) -> None:
    """Published models have such ids, for sizes of an embedding that was padded. No rank can choose them."""
    assert read(eos_token_id=[499, 500, -1, 0]).eos_token_ids == (499, 0)


def test_a_number_that_json_does_not_have_is_refused(read: Make) -> None:
    """In a field that is not read, too."""
    with pytest.raises(FailedPrecondition, match="NaN is no number of JSON"):
        read(unread=math.nan)


@pytest.mark.parametrize("head", ["GPT2ForSequenceClassification", "LlamaForTokenClassification", "T5EncoderModel"])
def test_a_head_that_makes_no_text_is_refused(read: Make, head: str) -> None:
    """It was served as a language model without a word."""
    with pytest.raises(FailedPrecondition, match=f"is of a '{head}', which generates no text"):
        read(architectures=[head])


@pytest.mark.parametrize(
    "head", ["GPT2LMHeadModel", "MistralForCausalLM", "T5ForConditionalGeneration", "GPT2Model", 7]
)
def test_a_head_that_makes_text_is_read(read: Make, head: object) -> None:
    assert read(architectures=[head]).model_type == "gpt2"


def test_a_tokenizer_in_gpt2s_old_form(tmp_path: Path) -> None:
    """It was left out in silence. The command in the sentence makes a tokenizer.json with the same tokens."""
    whole = json.loads((DEMO_MODEL / "tokenizer.json").read_text())["model"]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "vocab.json").write_text(json.dumps(whole["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in whole["merges"])]))
    with pytest.raises(FailedPrecondition, match=r"has vocab\.json and merges\.txt, and no tokenizer\.json") as raised:
        read_checkpoint(tmp_path)
    python, option, code = shlex.split(str(raised.value).partition("transformers makes it: ")[2])
    assert (python, option) == ("python", "-c")
    exec(code, {})  # noqa: S102  # of our own sentence
    made, before = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (tmp_path, DEMO_MODEL))
    assert read_checkpoint(tmp_path).tokenizer_file is not None
    text = "def main(x):\n    return '\u00fc' + 1  # \U0001f600"
    assert made.encode(text).ids == before.encode(text).ids
