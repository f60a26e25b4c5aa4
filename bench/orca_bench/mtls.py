"""Tokens a second with mTLS on every connection, against plaintext.

    python -m orca_bench.mtls [--streams 16] [--tokens 256] [--rounds 5] [--model FOLDER | --timed]

Two stacks of `orca serve` stand side by side, one in plaintext, one by mTLS with API keys, each of one engine with two
stages: so every kind of connection is there. Rounds go to them in turn, and each sends `streams` requests at once. With
--timed the model computes nothing, so that all time is the control plane's: the worst case for mTLS. The client's own
work is part of it. With mTLS the embedded Redis has a Unix socket, in plaintext a port.
"""

import argparse
import asyncio
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

from orca_client import AsyncOrcaClient, tls_credentials
from orca_common.api_keys import line_of, new_key
from orca_common.roles import Role
from orca_local.authority import Authority
from orca_local.settings import ServeSettings
from orca_local.stack import DEMO_MODEL, Stack

from .timed_model import make_timed_model

SLOTS = 1 << 16


async def tokens_per_second(client: AsyncOrcaClient, streams: int, tokens: int) -> float:
    """One round: `streams` requests of `tokens` tokens at once."""

    async def one() -> None:
        async with client.generate([1, 2, 3], max_new_tokens=tokens, ignore_eos=True) as stream:
            await stream.text()

    began = time.monotonic()
    await asyncio.gather(*(one() for _ in range(streams)))
    return streams * tokens / (time.monotonic() - began)


async def stack_of(open_: AsyncExitStack, folder: Path, model: Path, certificates: Path | None) -> AsyncOrcaClient:
    """A stack and a client of it, which the exit stack ends."""
    key = new_key() if certificates is not None else None
    settings = ServeSettings.load(
        model=str(model),
        device="cpu",
        pp=2,
        slots=SLOTS,
        port=0,
        http_port=0,
        max_batch_size=64,
        tls_dir=None if certificates is None else str(certificates),
        api_keys=None if key is None else line_of("bench", key),
    )
    stack = Stack(settings, folder, lambda step: None)
    open_.push_async_callback(stack.stop)
    await stack.start()
    credentials = None if certificates is None else tls_credentials(certificates / Role.CLIENT)
    client = AsyncOrcaClient(stack.grpc_addresses, credentials=credentials, api_key=key)
    return await open_.enter_async_context(client)


async def measure(model: Path, folder: Path, streams: int, tokens: int, rounds: int) -> None:
    authority = Authority(folder / "certificates")
    for role in Role:
        authority.issue(role)
    async with AsyncExitStack() as open_:
        clients = {
            "plaintext": await stack_of(open_, folder / "plaintext", model, None),
            "mTLS": await stack_of(open_, folder / "mtls", model, folder / "certificates"),
        }
        rates: dict[str, list[float]] = {name: [] for name in clients}
        for number in range(rounds + 1):  # the first one warms up
            for name, client in clients.items():
                rate = await tokens_per_second(client, streams, tokens)
                if number:
                    rates[name].append(rate)
    for name, found in rates.items():
        print(f"{name:10} {median(found):8.0f} tokens/s  ({min(found):.0f} to {max(found):.0f} in {rounds} rounds)")
    print(f"mTLS / plaintext: {median(rates['mTLS']) / median(rates['plaintext']):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--timed", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="orca-mtls-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        model = make_timed_model(folder / "timed") if given.timed else given.model
        asyncio.run(measure(model, folder, given.streams, given.tokens, given.rounds))


if __name__ == "__main__":
    main()
