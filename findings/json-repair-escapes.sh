#!/bin/sh
# json-repair 0.64.6: arguments that miss their last brace have an emoji as two halves, which no file and no socket
# takes.
#
# Guess before: whether a text is whole or was cut off, a string in it that has its two quotation marks is read alike.
# A whole text is read by Python's own reader. As soon as something has to be mended, a comma or a brace, json-repair
# reads the strings itself. It reads `\ud83d\ude00`, as many programs write an emoji in ASCII, as two characters that
# Python cannot encode: the repair succeeds, and whoever sends the value on has a UnicodeEncodeError. `\/` and `\f`
# keep their backslash (`http:\/\/x`), and the line breaks at a string's end are gone, a file's last one, say.
# `stream_stable=True` keeps those line breaks, and changes nothing else of it. A call that ends at `max_tokens` has
# its arguments cut off in any server, Orca too, and this is where they are mended.
#
# Seen with: json-repair 0.64.6, Python 3.11. Prints what is read, and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check json-repair==0.64.6
"$folder/env/bin/python" - <<'PYTHON'
import json

import json_repair


def encodes(value):
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


for part, whole, mended, stable in (
    (r'"a": "\ud83d\ude00"', "😀", "\ud83d\ude00", "\ud83d\ude00"),
    (r'"a": "gr\u00fcn"', "grün", "grün", "grün"),
    (r'"a": "http:\/\/x"', "http://x", r"http:\/\/x", r"http:\/\/x"),
    (r'"a": "one\ftwo"', "one\ftwo", r"one\ftwo", r"one\ftwo"),
    (r'"a": "exit 1\n"', "exit 1\n", "exit 1", "exit 1\n"),
):
    text = f"{{{part}}}"
    assert json.loads(text) == json_repair.loads(text) == {"a": whole}
    # One comma too many; a last brace that is missing; a member that was cut off.
    for text, more in ((f"{{{part},}}", {}), (f"{{{part}", {}), (f'{{{part}, "b": 1', {"b": 1})):
        found = [json_repair.loads(text), json_repair.loads(text, stream_stable=True)]
        print(f"{text}: {found[0]!r}, can be encoded: {encodes(found[0])}; with stream_stable {found[1]!r}")
        assert found == [{"a": mended} | more, {"a": stable} | more]
        assert encodes(found[0]) == encodes(found[1]) == (whole != "😀")
PYTHON
