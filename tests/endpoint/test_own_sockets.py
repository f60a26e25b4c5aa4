"""The connections of this process, by their port."""

import resource
import socket

from orca_endpoint.own_sockets import sockets_at


def test_a_connection_is_found_by_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = listening.accept()
            with accepted:
                assert len(list(sockets_at(port))) == 2  # what listens and what was accepted, not the client's
                for at in sockets_at(port):
                    if at.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0:
                        at.shutdown(socket.SHUT_RDWR)
                assert client.recv(1) == b""


def test_none_is_found_when_no_descriptor_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            assert list(sockets_at(listening.getsockname()[1])) == []
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
