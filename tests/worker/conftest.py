"""Fixtures of the worker's tests."""

from typing import Any

import pytest
from torch import Tensor

from orca_worker.models import cpu


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The logits that each iteration samples from: [B, V] in the batch's order."""
    seen: list[Tensor] = []
    sample = cpu.sample

    def look(of_batch: Tensor, *rest: Any) -> Any:
        seen.append(of_batch.clone())
        return sample(of_batch, *rest)

    monkeypatch.setattr(cpu, "sample", look)
    return seen
