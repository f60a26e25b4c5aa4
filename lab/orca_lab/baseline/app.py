"""A scheduler process of the lab: the scheduler service itself, with a selection of the lab in place of its policy."""

import sys
from collections.abc import Collection

from pydantic_settings import SettingsConfigDict

from orca_common.errors import InvalidArgument
from orca_scheduler import app
from orca_scheduler.core.core import Core
from orca_scheduler.core.policy import Policy
from orca_scheduler.core.roles import Role
from orca_scheduler.settings import SchedulerSettings

from .selections import any_policy, core_of


class LabSettings(SchedulerSettings):
    """Runs one scheduler with a selection of the lab."""

    model_config = SettingsConfigDict(cli_prog_name="orca_lab.baseline.app")

    lab_selection: str = "batchmaker"
    """As `any_policy` reads it: batchmaker, batchmaker-strict, or as in request-level,mbs=4,longest=1024."""

    def policy_for(self, can: Collection[str]) -> Policy:
        return any_policy(self.lab_selection)

    def core(self, role: Role | None = Role.MIXED) -> Core:
        if role:
            raise InvalidArgument("roles", "selections of the lab have none")
        return core_of(self.policy_for(()), self.max_batch_size, self.pp, self.block_size, self.run_ahead)


def main() -> None:
    """`python -m orca_lab.baseline.app`: settings from flags, environment and file."""
    app.main(LabSettings.load(sys.argv[1:]))
