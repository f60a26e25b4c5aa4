"""The adapters that a rank has: those of its setting, and those that its master has had it load since."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from orca_common.adapters import Adapter
from orca_common.checkpoint import Checkpoint
from orca_common.errors import FailedPrecondition

from ..iteration.kv import KVManager
from ..iteration.model import Adaptable, Model, ReadAdapter
from ..machine import free_bytes
from ..models.adapters import CONFIG, WEIGHTS, fingerprint
from ..models.families import adapter_file

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class Wanted(NamedTuple):
    """An adapter that the rank is to have."""

    id: str  # by which requests name it
    adapter: Adapter


class Held(NamedTuple):
    """Whether the rank has an adapter that it is to have."""

    id: str
    fingerprint: str  # of its files; "" where the rank does not have it
    error: str = ""  # why it does not


class Files(NamedTuple):
    """An adapter's files, which have been read once and checked."""

    fingerprint: str
    file: ReadAdapter | None  # None: the setting's adapter, as this rank began with it


class LoadedAdapters:
    """Loads and forgets adapters between two iterations. Only the GPU thread calls it, but for `read`.

    `numbers` has the number of each adapter in the model: by name for those of the setting, and by id for all that the
    master asked for.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device | None, numbers: dict[str, int]) -> None:
        self._checkpoint, self._device, self._numbers = checkpoint, device, numbers
        self._own = {one: fingerprint(one) for one in checkpoint.adapters}
        self._held: dict[str, Held] = {}  # by id
        self._model: Adaptable | None = None
        self._kv = KVManager(None)

    @property
    def unchanged(self) -> bool:
        """Whether the files of the setting's adapters are those that this rank began with."""
        return all(fingerprint(one) == print_then for one, print_then in self._own.items())

    def begin(self, model: Model | None, kv: KVManager) -> None:
        """Goes on with a model that has the setting's adapters alone; None: with no model. kv: beside it."""
        for gone in self._held:
            del self._numbers[gone]
        self._held.clear()
        self._model, self._kv = model if isinstance(model, Adaptable) else None, kv

    def keep(self, wanted: Sequence[Wanted]) -> list[Held]:
        """Forgets adapters that are not wanted any more. Returns those that are, and that are there."""
        for gone in self._held.keys() - {one.id for one in wanted}:
            self._forget(gone)
        return [self._held[one.id] for one in wanted if one.id in self._held]

    def read(self, wanted: Wanted) -> Files | Held:
        """Reads an adapter's files and checks them. Any thread may: iterations run meanwhile, on the slowest disk."""
        try:
            return self._read(wanted.adapter)
        except Exception as error:
            return _failed(wanted, error)

    def load(self, wanted: Wanted, files: Files) -> Held:
        """Loads one adapter. Its rows may run from the next iteration on."""
        try:
            number = self._load(wanted.adapter, files)
        except Exception as error:
            return _failed(wanted, error)
        self._numbers[wanted.id] = number
        self._held[wanted.id] = held = Held(wanted.id, files.fingerprint)
        return held

    def _forget(self, gone: str) -> None:
        number = self._numbers.pop(gone)
        del self._held[gone]
        if self._model is not None and number not in self._numbers.values():
            self._model.adapt(number, None)
            log.info("adapter unloaded", extra={"adapter": gone})

    def _read(self, adapter: Adapter) -> Files:
        if adapter in self._own and (found := fingerprint(adapter)) == self._own[adapter]:
            return Files(found, None)
        root = self._checkpoint.adapters_folder
        if root is None:
            raise FailedPrecondition(f"adapter {adapter.name}: this rank loads none (the setting adapters_folder)")
        for path in (adapter.folder, adapter.folder / CONFIG, adapter.folder / WEIGHTS):
            if not path.resolve().is_relative_to(root.resolve()):
                raise FailedPrecondition(f"adapter {adapter.name}: {path} is not below {root} (adapters_folder)")
        return Files(fingerprint(adapter), adapter_file(self._checkpoint, adapter))

    def _load(self, adapter: Adapter, files: Files) -> int:
        """The number of an adapter in the model."""
        model, (found, file) = self._model, files
        if model is None:
            raise FailedPrecondition(f"adapter {adapter.name}: this rank has no model that takes adapters")
        if file is None:
            return self._numbers[adapter.name]
        started = time.monotonic()
        free = free_bytes(self._device, modest=False, promised=self._kv.untouched_bytes)
        needed = model.adapter_bytes(file)
        if needed > free:
            raise FailedPrecondition(f"adapter {adapter.name}: it takes {needed} bytes of memory; {free} are free")
        taken = set(self._numbers.values())
        number = next(n for n in count() if n not in taken)
        model.adapt(number, file)
        if fingerprint(adapter) != found:
            model.adapt(number, None)
            raise FailedPrecondition(f"adapter {adapter.name}: {adapter.folder} was written over while it was read")
        seconds = round(time.monotonic() - started, 3)
        log.info("adapter loaded", extra={"adapter": adapter.name, "folder": str(adapter.folder), "seconds": seconds})
        return number


def _failed(wanted: Wanted, error: Exception) -> Held:
    """The answer where an adapter is not loaded. No error may stop the other adapters: a folder that is a link to
    itself raises RuntimeError, one with NUL in its name ValueError, and torch without memory RuntimeError."""
    if isinstance(error, FailedPrecondition):
        return Held(wanted.id, "", str(error))
    name = wanted.adapter.name
    log.error("adapter not loaded", exc_info=error, extra={"adapter": name})
    return Held(wanted.id, "", f"adapter {name}: {str(error) or type(error).__name__}")
