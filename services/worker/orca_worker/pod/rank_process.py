"""A rank's process, as the supervisor sees it: told which rank it is."""

import json

from orca_common.address import split_address

from ..processes.forked_process import ForkedProcess
from ..processes.forks import Forked
from ..settings import RankSettings


class RankProcess(ForkedProcess):
    """A process of the fork server's, which becomes a rank with these settings."""

    def __init__(self, forked: Forked, settings: RankSettings) -> None:
        super().__init__(forked, settings.model_dump(mode="json"))
        self.status: tuple[str, int] | None = None  # where its status port is, once it listens
        self.refusal = ""  # why it cannot work with its settings

    def _printed(self, line: str) -> None:
        if line.startswith('{"address"'):
            self.status = split_address(json.loads(line)["status"])
        elif line.startswith('{"refused"'):
            self.refusal = json.loads(line)["refused"]
        else:
            super()._printed(line)
