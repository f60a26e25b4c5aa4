"""Fixtures of the interop tests: a model for all of them, and one endpoint with each transport."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from endpoint.harness import World, make_model, world
from interop.engine import POSITIONS

from orca_common.roles import Role
from orca_local.authority import Authority


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("checkpoint") / "tiny", positions=POSITIONS)


@dataclass(frozen=True)
class Door:
    """An endpoint's gRPC door, and what a client needs to call it."""

    orca: World
    address: str
    certificates: Path | None  # of a client; None: the door speaks plaintext


@pytest.fixture(params=["plaintext", "tls"])
async def door(request: pytest.FixtureRequest, redis_url: str, model: Path, tmp_path: Path) -> AsyncIterator[Door]:
    certificates, settings = None, {}
    if request.param == "tls":
        authority = Authority(tmp_path / "ca")
        settings["tls_dir"] = str(authority.issue(Role.ENDPOINT))
        certificates = authority.issue(Role.CLIENT)
    async with world(redis_url, model, slots=4 * POSITIONS, **settings) as orca:
        yield Door(orca, orca.serving.addresses["grpc"], certificates)
