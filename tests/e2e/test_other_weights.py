"""A change of the weights under load: no stream has tokens of two models."""

from pathlib import Path

import pytest
from e2e.other_weights import REQUESTS, rounds_of
from properties import first


@pytest.mark.parametrize("engines", first(1, [1, 2]))
async def test_each_stream_has_tokens_of_one_model(tmp_path: Path, engines: int) -> None:
    ends = await rounds_of(tmp_path, 1, seed=5, engines=engines, pp=1)
    assert ends.total() == REQUESTS[engines]
    if engines == 1:
        assert ends["MODEL_CHANGED"], "what had tokens cannot go on anywhere"
