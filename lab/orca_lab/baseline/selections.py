"""All selections of the lab by name: the scheduler's policies, BatchMaker's cells, and request-level batches."""

from orca_scheduler.core.core import Core
from orca_scheduler.core.policy import Policy
from orca_scheduler.core.roles import Role
from orca_scheduler.core.sets import policy_named

from .batchmaker import BatchMaker
from .engine import NAME, BatchCore, WholeBatches

CELLS: dict[str, Policy] = {one.name: one for one in (BatchMaker(), BatchMaker(strict=True))}


def is_baseline(text: str) -> bool:
    """Whether a policy of this name is the lab's alone."""
    return text in CELLS or text.split(",", maxsplit=1)[0] == NAME


def any_policy(text: str) -> Policy:
    """A baseline's policy, or one of the scheduler's. Raises ValueError."""
    if not is_baseline(text):
        return policy_named(text)
    return CELLS[text] if text in CELLS else WholeBatches.read(text)


def core_of(
    policy: Policy, max_bs: int, n_workers: int, block_size: int, run_ahead: int = 0, role: Role = Role.MIXED
) -> Core:
    """The core that a policy runs in."""
    if isinstance(policy, WholeBatches):
        assert not role, "whole batches stay on their engine"
        return BatchCore(max_bs, block_size, policy)
    return Core(max_bs, n_workers, block_size, run_ahead, policy, role)
