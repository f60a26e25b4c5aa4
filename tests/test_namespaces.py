"""The places of `make links`: they reach each other, and a cut drops one direction without a word."""

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from namespaces import HERE, Places, missing, places

# Listens, prints its port, and answers each datagram with another one.
ECHO = """
import socket, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
while True:
    data, sender = server.recvfrom(100)
    print(data.decode(), flush=True)
    server.sendto(data, sender)
"""


@pytest.fixture(scope="module")
def two() -> Iterator[Places]:
    if (why := missing()) is not None:
        pytest.skip(why)
    with places(["a", "b"]) as made:
        yield made


def test_a_cut_drops_one_direction(two: Places) -> None:
    command = [*two.inside("a"), sys.executable, "-c", ECHO, two.address("a")]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as echo,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking,
    ):
        assert echo.stdout is not None
        try:
            asking.connect((two.address("a"), int(echo.stdout.readline())))

            def ask(text: str, seconds: float = 20.0) -> str | None:
                asking.settimeout(seconds)
                asking.send(text.encode())
                try:
                    return asking.recv(100).decode()
                except TimeoutError:
                    return None

            assert ask("one") == "one"
            two.cut(HERE, "a")
            assert ask("two", 0.3) is None
            two.mend(HERE, "a")
            two.cut("a", HERE)
            assert ask("three", 0.3) is None
            two.mend("a", HERE)
            assert ask("four") == "four"
            assert [echo.stdout.readline().strip() for _ in range(3)] == ["one", "three", "four"]
        finally:
            echo.kill()


def test_places_reach_each_other(two: Places) -> None:
    program = f"import socket; socket.create_connection(('{two.address('b')}', 9), timeout=2)"
    done = subprocess.run(
        [*two.inside("a"), sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=30
    )
    assert "ConnectionRefusedError" in done.stderr  # an answer: nobody listens there
