"""`python -m orca_worker`: the supervisor of a pod. Its fork server begins before the supervisor is imported."""

import gc

from .processes.beginning import begin

first = begin()
gc.disable()  # until `service.run`: modules stay

from .pod.supervisor import main  # noqa: E402 it imports for a third of a second

main(first=first)
