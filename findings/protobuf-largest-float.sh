#!/bin/sh
# protobuf 7.36.2: the largest float32 is written to JSON, and refused when it is read again.
#
# `MessageToJson` writes a `float` with as few digits as name it: 3.4028235e+38, which is a bit above the number. `Parse`
# compares what it reads with the largest float32 as a double, before it rounds, and says "Float value too large". So a message with
# `torch.finfo(torch.float32).min`, the usual mask of logits, does not come through JSON; -inf does, and all other numbers.
# The text format takes it.
#
# Seen with: protobuf 7.36.2 (upb), Python 3.11. Prints what is written and read, and fails when it is taken.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check protobuf==7.36.2
"$folder/env/bin/python" - <<'PYTHON'
import struct

from google.protobuf import json_format, text_format
from google.protobuf.wrappers_pb2 import FloatValue


def comes_back(bits):
    """Whether the float32 of these bits is the same after JSON."""
    message = FloatValue(value=struct.unpack("f", struct.pack("I", bits))[0])
    assert text_format.Parse(text_format.MessageToString(message), FloatValue()) == message
    written = json_format.MessageToJson(message)
    try:
        read = json_format.Parse(written, FloatValue())
    except json_format.ParseError as error:
        print(f"{written}: {error}")
        return False
    print(f"{written}: {read.value!r}")
    return read == message


LARGEST, MINUS = 0x7F7FFFFF, 1 << 31
assert not comes_back(LARGEST)
assert not comes_back(MINUS | LARGEST)
assert comes_back(LARGEST - 1)
assert comes_back(LARGEST + 1)  # infinity
assert comes_back(1)  # the smallest above zero
PYTHON
