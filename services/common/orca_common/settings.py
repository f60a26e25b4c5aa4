"""Settings of a service: typed fields, read from `ORCA_*` in the environment or given by name.

This module and its subclasses' files (`settings.py` of each service) are all that reads the environment.
"""

import os
from collections.abc import Mapping
from typing import Any, Self

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict


def child_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child process: this process's own, and settings over it."""
    return {**os.environ, **settings}


class Settings(BaseSettings):
    """Base of a service's settings. A field `max_batch_size` is `ORCA_MAX_BATCH_SIZE` and `--max-batch-size`."""

    model_config = SettingsConfigDict(env_prefix="ORCA_", frozen=True, extra="forbid")

    @classmethod
    def load(cls, **given: Any) -> Self:
        """Settings from the environment, overridden by what is given (None: not given).

        Raises SystemExit with a sentence that names the wrong setting and its value.
        """
        try:
            return cls(**{name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            first = error.errors()[0]
            name = "_".join(["ORCA", *(str(part) for part in first["loc"][:1])]).upper()
            raise SystemExit(f"{name}: {first['msg']} (it is {first['input']!r})") from None

    def environment(self) -> dict[str, str]:
        """These settings as the environment of a child process."""
        values = self.model_dump(mode="json", exclude_none=True)
        return {f"ORCA_{name.upper()}": str(value) for name, value in values.items()}


class ServiceSettings(Settings):
    """What every service has."""

    host: str = "127.0.0.1"  # address that the service's ports listen on
    status_port: int = 0  # /livez and /readyz; 0 takes a free one
    drain_seconds: float = 30.0
    log_level: str = "INFO"
    run_dir: str | None = None  # folder of journals; none are written without it


class PoolSettings(Settings):
    """Where the request pool is."""

    redis_url: str = "redis://127.0.0.1:6379/0"
    pool: str = "default"  # the release's name: `orca:{POOL}:...` in its keys
