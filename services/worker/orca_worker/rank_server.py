"""The server of a rank's control lanes: its controller, for callers of the right role."""

from orca_common.errors import Unavailable
from orca_common.lanes.server import LaneCall, LaneServer
from orca_common.protocol import CONTROLLER
from orca_common.roles import Role, check_role, roles_in
from orca_common.tls import Transport

from .controller import LEAVING, Controller

# Who may call what, where certificates tell.
ALLOWED = {f"/{CONTROLLER}/": frozenset({Role.SCHEDULER}), f"/{CONTROLLER}/Relay": frozenset({Role.WORKER})}


class RankServer:
    """Serves a rank."""

    def __init__(self, controller: Controller, transport: Transport) -> None:
        self._context = transport.server_context()
        self._server = LaneServer(controller.methods(), self._admit, Unavailable(LEAVING))

    async def start(self, host: str, port: int) -> int:
        """Listens on a port (0: a free one) and returns it. Raises Unavailable when it cannot be had."""
        return await self._server.start(host, port, self._context)

    async def stop(self, grace: float) -> None:
        """Accepts nothing more, and ends the calls that are left after `grace` seconds."""
        await self._server.stop(grace)

    def _admit(self, call: LaneCall) -> None:
        """Raises PermissionDenied for a caller of another role."""
        if self._context is not None:
            check_role(call.path, ALLOWED, roles_in(call.certificate_names()))
