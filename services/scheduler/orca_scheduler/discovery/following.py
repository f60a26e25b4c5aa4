"""A copy of a collection in Kubernetes, kept by list and watch. Failed reads keep the previous state."""

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Never

from .kubernetes import Change, Collection, Kubernetes, Trouble
from .pods import Manifest

log = logging.getLogger(__name__)

FIRST_RETRY, LONGEST_RETRY = 0.2, 5.0  # seconds: news of pods is wanted within seconds after the API server is back


class Follower:
    """Follows one collection. `changed` is called at every change of `objects` and of `trouble`."""

    def __init__(
        self, kubernetes: Kubernetes, collection: Callable[[], Collection], changed: Callable[[], None]
    ) -> None:
        self.objects: dict[str, Manifest] | None = None  # by uid; None: they were never read
        self.trouble: Trouble | None = None  # why they cannot be read now
        self._kubernetes, self._collection, self._changed = kubernetes, collection, changed
        self._listed: Collection | None = None  # what `version` is of; None: it has to be listed
        self._version = ""
        self._retry = FIRST_RETRY

    async def run(self) -> Never:
        """Lists, then watches, again and again."""
        while True:
            try:
                collection = self._collection()
                if collection != self._listed:
                    await self._list(collection)
                await self._watch(collection)
                self._retry = FIRST_RETRY
            except Trouble as trouble:
                if trouble.status == 410:
                    self._listed = None  # nothing is wrong: the server has forgotten what came before
                else:
                    self._failed(trouble)
            # Half of the pause is chance, so that those who lost the API server together do not come back together.
            await asyncio.sleep(self._retry * random.uniform(0.5, 1))
            self._retry = min(2 * self._retry, LONGEST_RETRY)

    async def _list(self, collection: Collection) -> None:
        listing = await self._kubernetes.list(collection)
        self.objects, self._listed, self._version = listing.objects, collection, listing.version
        self._recovered()
        self._changed()

    async def _watch(self, collection: Collection) -> None:
        async with self._kubernetes.watch(collection, self._version) as changes:
            self._recovered()
            async for change in changes:
                self._retry = FIRST_RETRY
                self._apply(change)

    def _apply(self, change: Change) -> None:
        assert self.objects is not None, "a watch follows a list"
        self._version = change.version
        if change.kind == "BOOKMARK":
            return
        if change.kind == "DELETED":
            self.objects.pop(change.uid, None)
        else:
            self.objects[change.uid] = change.object
        self._changed()

    def _failed(self, trouble: Trouble) -> None:
        told, self.trouble = self.trouble, trouble
        if told is None or told.status != trouble.status:  # one line a state, not one a try
            log.warning("discovery has trouble", extra={"why": str(trouble)})
            self._changed()

    def _recovered(self) -> None:
        if self.trouble is not None:
            self.trouble = None
            log.info("discovery has no trouble any more", extra={"of": self._collection().kind})
            self._changed()
