#!/bin/sh
# h2 4.4.1: a connection whose log is off makes the text of every frame that it receives.
#
# `H2Configuration` has no logger by default and says that nothing is logged then. The text for the line that is not written
# is made all the same: hyperframe's `repr`, with the frame's flags by name and its first bytes in hex, once a frame. In
# a server of small messages that was a tenth of the samples of its busy thread.
#
# Seen with: h2 4.4.1, hyperframe 6.1.0, Python 3.11: 1,000 texts for 1,000 PING frames. Prints both numbers and the share
# of the time, and fails when a connection without a log makes no text any more.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check h2==4.4.1 hyperframe==6.1.0
"$folder/env/bin/python" - <<'PYTHON'
import time

from h2.config import H2Configuration
from h2.connection import H2Connection
from hyperframe.frame import Frame, PingFrame

PINGS = 1000


def received():
    """Seconds of processor time in which a server reads the pings."""
    server = H2Connection(H2Configuration(client_side=False))
    client = H2Connection(H2Configuration())
    client.initiate_connection()
    server.initiate_connection()
    server.receive_data(client.data_to_send())
    pings = PingFrame(opaque_data=b"12345678").serialize() * PINGS
    began = time.process_time()
    server.receive_data(pings)
    return time.process_time() - began


made, text = 0, Frame.__repr__


def counted(frame):
    global made
    made += 1
    return text(frame)


as_it_is = min(received() for _ in range(20))
Frame.__repr__ = lambda frame: ""
without = min(received() for _ in range(20))
Frame.__repr__ = counted
received()
print(f"{made} texts for {PINGS} frames and the greeting's; {1 - without / as_it_is:.0%} of the time")
assert made >= PINGS, "no text is made for a log that is off"
PYTHON
