"""The lines that the doors write of their calls, as their fields."""

import json
from typing import Any

import pytest

from orca_common.logs import JsonFormatter


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Of each call that has ended or was refused, as they stand in the log."""
    formatter = JsonFormatter("test")
    return [json.loads(formatter.format(r)) for r in caplog.records if r.name == "orca_endpoint.calls.line"]
