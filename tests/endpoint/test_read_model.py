"""Warnings of an endpoint about the model that it reads at its start."""

import json
from pathlib import Path
from typing import Any

import pytest
from endpoint.harness import VOCABULARY, make_model
from tokenizers import Tokenizer

from orca_endpoint.app import EndpointApp
from orca_endpoint.settings import EndpointSettings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path / "tiny")


def warnings_of(folder: Path, caplog: pytest.LogCaptureFixture, **config: Any) -> list[dict[str, Any]]:
    """All that the endpoint's log has of a model with these fields in its config.json."""
    numbers = {"model_type": "gpt2", "vocab_size": VOCABULARY, "n_positions": 64}
    (folder / "config.json").write_text(json.dumps(numbers | config))
    caplog.clear()
    EndpointApp(EndpointSettings.load(redis_url="redis://127.0.0.1:1/0", model=str(folder)))._read_model()
    said = [vars(record) for record in caplog.records if record.name == "orca_endpoint.app"]
    assert all(one["levelname"] == "WARNING" for one in said)
    return [{name: one[name] for name in ("msg", "tokenizer", "model", "fields") if name in one} for one in said]


def test_a_tokenizer_with_another_end_than_the_model(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    a = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("a")
    message = "the tokenizer ends a text with another token than the model; chats end with either"
    for end, ends, warned in (
        ("a", 0, [{"msg": message, "tokenizer": a, "model": [0]}]),
        ("a", [0, 1], [{"msg": message, "tokenizer": a, "model": [0, 1]}]),
        ("a", [0, a], []),
        ("<|end|>", 0, []),
        ("a", None, []),
        (None, 0, []),
    ):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        assert warnings_of(folder, caplog, eos_token_id=ends) == warned, (end, ends)


def test_ways_to_generate_that_are_not_there(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    message = "the model asks for ways to generate that Orca does not have"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": None}))
    assert warnings_of(folder, caplog, num_beams=3) == [{"msg": message, "fields": {"num_beams": 3}}]
    assert warnings_of(folder, caplog, num_beams=1) == []
