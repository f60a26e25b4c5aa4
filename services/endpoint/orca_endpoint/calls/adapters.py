"""The adapters that requests may name: those of the settings, and those that operators have loaded."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from orca_common.adapters import Adapter, check_names, parse_adapter, read_adapters
from orca_common.bounded_file import read_bounded
from orca_common.errors import FailedPrecondition, InvalidArgument, NotFound, PermissionDenied, Unavailable
from orca_common.file_version import version_of
from orca_pool.pool import TAKEN, Pool
from orca_pool.retry import reached

from ..settings import EndpointSettings

log = logging.getLogger(__name__)

LOOK = 0.5  # seconds between looks at the pool's table, and at the file
WATCH = 0.05  # seconds between looks at whether engines have loaded an adapter
LOAD_SECONDS = 60.0  # for engines to load one
FILE_BYTES = 1 << 20
MAX_FOLDER = 4096  # characters, as of a path on Linux


class ServedAdapters:
    """`ids` has the id of the adapter with which requests of a name begin now.

    A name of the settings has none while the pool does not know it, as when an endpoint of newer settings has taken it
    out: then it is served no more.
    """

    def __init__(self, settings: EndpointSettings, model: str, pool: Pool) -> None:
        """model: the name of the model itself. Raises FailedPrecondition."""
        self._settings, self._model, self._pool = settings, model, pool
        self._file = Path(settings.adapters_file) if settings.adapters_file else None
        self._file_version = self._seen()
        self._named = self._read()
        self._version = -1  # of the pool's table
        self.ids: Mapping[str, str] = {}
        self._operators = frozenset(one.strip() for one in settings.operators.split(",") if one.strip())

    @property
    def _may_change(self) -> bool:
        return bool(self.ids or self._named or self._file is not None or self._operators)

    def _seen(self) -> object:
        return None if self._file is None else version_of(self._file)

    def _read(self) -> tuple[Adapter, ...]:
        """The adapters of the settings. Raises FailedPrecondition."""
        said = self._settings.adapters
        if self._file is not None:
            try:
                lines = read_bounded(self._file, FILE_BYTES).decode().splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise FailedPrecondition(f"adapters_file: {self._file} cannot be read ({error})") from None
            said = ",".join([said, *(line.partition("#")[0] for line in lines)])
        adapters = read_adapters(said)
        check_names(adapters, self._model, self._settings.others)
        return adapters

    async def begin(self) -> None:
        """Writes the settings' adapters into the pool. Raises Unavailable."""
        if self._may_change or (await self._pool.adapters()).version:
            await self._name()
            await self._look()

    async def _name(self) -> None:
        await self._pool.name_adapters({name: str(folder) for name, folder in self._named})

    async def _look(self) -> None:
        """Reads the pool's table, if it is another one."""
        table = await self._pool.adapters(self._version)
        if table.version == self._version:
            return
        if not table.version and self._named:  # Redis has forgotten it
            await self._name()
            table = await self._pool.adapters()
        self._version = table.version
        named, ids = {adapter.name for adapter in self._named}, dict[str, str]()
        for one in sorted(table.entries.values(), key=lambda entry: (entry.name, entry.state != "pending")):
            if one.state == "current" or (one.state == "pending" and one.name in named):
                ids[one.name] = one.id  # a current one comes behind, and counts
        self.ids = ids

    async def follow(self) -> None:
        """Keeps up with the pool's table and with the file. Ends with its task."""
        while self._may_change:
            await asyncio.sleep(LOOK)
            await reached(self._follow_file)
            await reached(self._look)
        await asyncio.Event().wait()

    async def _follow_file(self) -> None:
        seen = self._seen()
        if seen == self._file_version:
            return
        try:
            self._named = self._read()
        except FailedPrecondition as error:
            log.error("the adapters were not read again: %s", error)
        else:
            await self._name()
            log.info("adapters read", extra={"adapters": len(self._named)})
        self._file_version = seen

    # -- for operators

    def check_operator(self, tenant: str) -> None:
        """Raises PermissionDenied for a tenant who may not load and unload adapters."""
        if not self._operators & {"*", tenant or "*"}:
            who = f"tenant {tenant!r}" if tenant else "a caller without a key"
            raise PermissionDenied(f"{who} may not load and unload adapters here (the setting operators)")

    async def load(self, name: str, folder: str, *, replace: bool) -> None:
        """Returns when all engines that have formed serve the adapter, or cannot. replace: also a name that is taken.

        Raises InvalidArgument, FailedPrecondition where no engine can load it, and Unavailable where none has in time,
        or another call has replaced or unloaded it meanwhile.
        """
        if not folder.isprintable() or len(folder) > MAX_FOLDER:
            raise InvalidArgument("lora_path", f"must be at most {MAX_FOLDER} printable characters")
        try:
            if parse_adapter(f"{name}={folder}") != (name, Path(folder)):
                raise InvalidArgument("lora_name", "must have no '=', and neither it nor lora_path spaces at an end")
            check_names((Adapter(name, Path(folder)),), self._model, self._settings.others)
        except FailedPrecondition as error:
            raise InvalidArgument("lora_name", str(error).removeprefix("adapters: ")) from None
        adapter = await self._pool.load_adapter(name, folder, replace)
        if not adapter:
            raise self._of_settings(name)
        if adapter == TAKEN:
            raise InvalidArgument("lora_name", f"{name!r} is loaded already; load_inplace replaces it")
        loop = asyncio.get_running_loop()
        give_up = loop.time() + LOAD_SECONDS
        while True:
            table = await self._pool.adapters(about=adapter)
            if adapter not in table.entries or table.entries[adapter].state == "retired":
                raise Unavailable(f"adapter {name}: another call has replaced or unloaded it meanwhile")
            said = table.engines
            if late := loop.time() >= give_up:
                said = {engine: one for engine, one in said.items() if one}
            if said and all(said.values()):
                break
            if late:
                await self._pool.drop_adapter(adapter)
                raise Unavailable(f"adapter {name}: no engine has loaded it within {LOAD_SECONDS:g} s")
            await asyncio.sleep(WATCH)
        refusals = [one[1:] for one in said.values() if one.startswith("-")]
        if len(refusals) == len(said):
            await self._pool.drop_adapter(adapter)
            raise FailedPrecondition(refusals[0])
        await self._look()

    async def unload(self, name: str) -> None:
        """Takes an adapter away from new requests; those that have it go on. Raises NotFound, FailedPrecondition."""
        if name in {adapter.name for adapter in self._named}:
            raise self._of_settings(name)
        if not await self._pool.unload_adapter(name):
            raise NotFound(f"no adapter of the name {name!r} is loaded")
        await self._look()

    def _of_settings(self, name: str) -> FailedPrecondition:
        return FailedPrecondition(f"adapter {name}: it is of the settings (adapters, adapters_file): change it there")
