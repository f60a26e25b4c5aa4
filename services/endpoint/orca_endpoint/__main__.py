"""`python -m orca_endpoint`."""

import gc

from orca_common.environment import quiet_grpc

quiet_grpc()
gc.disable()  # until `service.run`: modules stay, and looking for garbage among them takes a tenth of their import

from .app import main  # noqa: E402

main()
