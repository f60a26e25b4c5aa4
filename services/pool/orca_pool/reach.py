"""Whether a Redis can be reached at all, before anything is built on it."""

import asyncio

from redis.exceptions import RedisError

from orca_common.errors import FailedPrecondition, Unavailable
from orca_common.settings import without_password

from .link import Link, NoAnswer
from .retry import reached


async def check_reachable(
    redis_url: str, seconds: float, *, password: str | None = None, tls_dir: str | None = None
) -> None:
    """Asks the Redis of an URL for an answer. Raises FailedPrecondition with a sentence when none comes in time, and
    when it is too old.

    seconds: how long it is asked again and again, because it may be starting. password, tls_dir: as for `Pool`.
    """
    link = Link(redis_url, password=password, tls_dir=tls_dir)
    told: list[Unavailable] = []

    async def ping() -> None:
        try:
            await link.command("PING")
        except Unavailable as error:
            told.append(error)
            raise

    try:
        await reached(ping, give_up=asyncio.get_running_loop().time() + seconds)
        link.check_version()
    except (Unavailable, RedisError) as error:
        # A wrong password is refused at once, and a try after that may be late.
        why = next((one for one in reversed(told) if not isinstance(one, NoAnswer)), error)
        raise FailedPrecondition(f"redis_url: {without_password(redis_url)}: {why}") from None
    finally:
        await link.close()
