"""Reads the messages of one logger: other tasks write to the log, too, whenever they come to it."""

import pytest


def messages_of(caplog: pytest.LogCaptureFixture, logger: str) -> list[str]:
    """The messages of a logger, in their order."""
    return [record.getMessage() for record in caplog.records if record.name == logger]
