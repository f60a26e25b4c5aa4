"""Event loops that check how they are used."""

import asyncio
import threading


class OwnThreadLoop(asyncio.SelectorEventLoop):
    """A loop that refuses to tell its time to another thread: uvloop's `time` is not safe there."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def time(self) -> float:
        assert threading.get_ident() == self._thread
        return super().time()
