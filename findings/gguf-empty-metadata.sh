#!/bin/sh
# gguf 0.19.0: an empty string or list is not written, and a list of lists reads back as one flat list.
#
# GGUF has strings and arrays of any length, and arrays of arrays. `GGUFWriter` leaves a key with an empty value out and says
# nothing, so a reader cannot tell "none" from "not said"; its `add_key_value` writes an empty string. Nested lists are
# written as nested, but `contents()` of `GGUFReader` runs them together, and where the inner lists end is lost.
#
# Seen with: gguf 0.19.0, Python 3.11. Prints what is read, and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check gguf==0.19.0
"$folder/env/bin/python" - "$folder/file.gguf" <<'PYTHON'
import sys

import gguf

writer = gguf.GGUFWriter(sys.argv[1], "llama")
writer.add_string("test.string.empty", "")
writer.add_string("test.string.full", "a")
writer.add_array("test.list.empty", [])
writer.add_array("test.list.full", ["", "a"])
writer.add_array("test.list.nested", [[1, 2], [3]])
writer.add_key_value("test.string.by_hand", "", gguf.GGUFValueType.STRING)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
fields = gguf.GGUFReader(sys.argv[1]).fields
read = {key: field.contents() for key, field in fields.items() if key.startswith("test.")}
print(read)
assert read == {
    "test.string.full": "a",
    "test.list.full": ["", "a"],
    "test.list.nested": [1, 2, 3],
    "test.string.by_hand": "",
}
assert fields["test.list.nested"].types == [
    gguf.GGUFValueType.ARRAY,
    gguf.GGUFValueType.ARRAY,
    gguf.GGUFValueType.INT32,
]
PYTHON
