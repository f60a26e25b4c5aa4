"""The pool over rediss://. The embedded server has no TLS, so a proxy that asks for certificates stands before it."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from listening import forwarding
from redis.exceptions import ConnectionError
from replicated import sentinel
from servers import redis_server

from orca_common.errors import Unavailable
from orca_common.roles import REDIS, Role
from orca_local.authority import Authority
from orca_pool.pool import Pool
from orca_pool.primary import Primary
from orca_pool.signing_in import options


@asynccontextmanager
async def proxy(port: int, folder: Path) -> AsyncIterator[int]:
    """Speaks TLS with a certificate, asks its clients for theirs, and forwards to a port in plaintext."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=folder / "ca.crt")
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.verify_mode = ssl.CERT_REQUIRED

    async with forwarding(lambda: port, context) as front:
        yield front


async def test_redis_by_mtls(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other")
    with redis_server() as redis:
        async with proxy(redis.port, authority.issue(REDIS)) as port:
            url, folder = f"rediss://localhost:{port}/0", authority.issue(Role.SCHEDULER)
            async with Pool(url, "a", tls_dir=str(folder)) as pool:
                await pool.identify("digest", 10, 10)
            async with Pool(url, "a", tls_dir=str(other.issue(Role.SCHEDULER))) as pool:
                with pytest.raises(Unavailable):
                    await pool.identity()
            async with Pool(url, "a", tls_dir=str(folder)) as pool:
                assert await pool.identity() is not None
                authority.issue(Role.SCHEDULER, lasts=timedelta(hours=-1))
                await pool._link._drop_connections()
                with pytest.raises(Unavailable):  # a new connection reads the files again: they have expired
                    await pool.identity()
                authority.issue(Role.SCHEDULER)
                assert await pool.identity() is not None, "rotated without a restart"
            async with Pool(url, "a") as pool:
                with pytest.raises(Unavailable):  # no certificate, and an authority that this machine does not know
                    await pool.identity()


async def test_sentinels_by_mtls(tmp_path: Path) -> None:
    """They say where the primary is by TLS, too, and a service cannot pass for one."""
    authority = Authority(tmp_path / "ca")
    shown = options("rediss", None, str(authority.issue(Role.SCHEDULER)))
    with redis_server() as redis, sentinel(tmp_path / "s", redis.port) as plain:
        async with proxy(plain, authority.issue(REDIS)) as port, proxy(plain, authority.issue(Role.WORKER)) as other:
            found = Primary(f"rediss+sentinel://localhost:{port}/orca/0", 20.0, shown)
            assert await found.find() == ("127.0.0.1", redis.port)
            await found.close()
            strange = options("rediss", None, str(Authority(tmp_path / "other").issue(Role.SCHEDULER)))
            for at, certificate, why in (
                (other, shown, "is that of worker, not of Redis"),
                (port, strange, "CERTIFICATE_VERIFY_FAILED"),
            ):
                wrong = Primary(f"rediss+sentinel://localhost:{at}/orca/0", 20.0, certificate)
                with pytest.raises(ConnectionError, match=f"no Sentinel names a primary of orca: .*{why}"):
                    await wrong.find()
                await wrong.close()


async def test_a_service_cannot_pass_for_redis(tmp_path: Path) -> None:
    """Its certificate is of the right authority and for the right host, and names another role."""
    authority = Authority(tmp_path / "ca")
    with redis_server() as redis:
        async with proxy(redis.port, authority.issue(Role.WORKER)) as port:
            folder = str(authority.issue(Role.SCHEDULER))
            async with Pool(f"rediss://localhost:{port}/0", "a", tls_dir=folder) as pool:
                with pytest.raises(Unavailable, match="is that of worker, not of Redis"):
                    await pool.identity()
