#!/bin/sh
# pyarrow 26.0.1: a JSON text is a timestamp, if all texts of its block look like dates. Its time zone is gone then.
#
# Guess before: what stands in quotes stays a text, since JSON marks what is one; a CSV file has to be guessed at, a
# JSON file does not. `pyarrow.json` tries whether all texts of a column are dates, also those within messages. A file
# of questions and short answers becomes `{"role": "assistant", "content": datetime}`, and "2026-01-01T10:00:00+02:00"
# is 08:00 without a zone. One answer that is no date makes texts of all again, so a part of a data set may have
# another type than the whole. A schema (`ParseOptions(explicit_schema=...)`) keeps texts. A whole number beyond 2^63
# is a float64, and loses its last digits.
#
# Seen with: pyarrow 26.0.1, Python 3.11. Prints the types and values, and fails when they change.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check pyarrow==26.0.1
"$folder/env/bin/python" - <<'PYTHON'
import datetime
import io
import json

import pyarrow
from pyarrow import json as reader


def read(*texts, schema=None):
    lines = "\n".join(json.dumps({"answer": {"role": "assistant", "content": text}}) for text in texts)
    table = reader.read_json(io.BytesIO(lines.encode()), parse_options=reader.ParseOptions(explicit_schema=schema))
    kind = str(table.schema.field("answer").type.field("content").type)
    values = [row["answer"]["content"] for row in table.to_pylist()]
    print(f"{texts}: {kind}, {values[0]!r}")
    return kind, values[0]


parts = pyarrow.struct({"role": pyarrow.string(), "content": pyarrow.string()})
schema = pyarrow.schema({"answer": parts})
day, eight = datetime.datetime(2026, 1, 1), datetime.datetime(2026, 1, 1, 8)
assert read("2026-01-01", "2026-02-03") == ("timestamp[s]", day)
assert read("2026-01-01", "in spring") == ("string", "2026-01-01")
assert read("2026-01-01T10:00:00+02:00") == ("timestamp[s]", eight)
assert read("2026-01-01", "2026-02-03", schema=schema) == ("string", "2026-01-01")
assert read("12:30:00", "1.0") == ("string", "12:30:00")
assert read(2**63 + 1) == ("double", 2.0**63)
PYTHON
