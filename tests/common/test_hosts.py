"""The names by which a port may be called, so that no page of another site reaches it through a browser."""

import asyncio

import httpx2 as httpx
import pytest

from orca_common.hosts import Hosts
from orca_common.service import StatusPort

OURS = (
    *("localhost", "LOCALHOST:8000", "localhost.", "orca.localhost:80", "127.0.0.1", "127.0.0.1:8000", "127.8.8.8"),
    *("[::1]", "[::1]:8000", "192.168.1.5:8000", "[fe80::1]:80", ""),
)
OTHERS = (
    *("evil.example", "evil.example:8000", "localhost.evil.example", "evillocalhost", "127.0.0.1.evil.example"),
    *("[evil.example]", "evil.example.", "127.0.0.1@evil.example", "1"),
)


@pytest.mark.parametrize("listening", ["127.0.0.1", "127.5.0.1", "localhost", "::1"])
def test_on_loopback_no_other_name_is_taken(listening: str) -> None:
    hosts = Hosts(listening)
    assert [host for host in OURS if hosts.refusal([host]) is not None] == []
    assert [host for host in OTHERS if hosts.refusal([host]) is None] == []
    assert hosts.refusal([]) is None, "HTTP/1.0, which no browser speaks"
    assert hosts.refusal(["localhost", "evil.example"]) is not None


def test_where_any_name_may_be_right() -> None:
    """A Service's, an ingress's; and where callers have keys."""
    for hosts in (Hosts("0.0.0.0"), Hosts("10.1.2.3"), Hosts("127.0.0.1", keyed=True), Hosts("127.0.0.1", "*")):
        assert [host for host in (*OURS, *OTHERS) if hosts.refusal([host]) is not None] == []


def test_names_that_are_given_hold_everywhere() -> None:
    for hosts in (Hosts("127.0.0.1", "API.example.com, other"), Hosts("0.0.0.0", "api.example.com,other", keyed=True)):
        assert [host for host in (*OURS, "api.example.com:443", "Other") if hosts.refusal([host]) is not None] == []
        assert [host for host in OTHERS if hosts.refusal([host]) is None] == []
    assert Hosts("::1").refusal(["evil.example"]) == (
        "'evil.example' is no name of this port; the setting host_names gives it further ones"
    )


async def test_a_status_port() -> None:
    port = StatusPort("127.0.0.1", 0, lambda: None, lambda: True)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port.port}", trust_env=False) as client:
            assert (await client.get("/readyz")).status_code == 200
            refused = await client.get("/metrics", headers={"host": "evil.example"})
        assert refused.status_code == 421
        assert "evil.example" in refused.text
    finally:
        await asyncio.to_thread(port.close)
