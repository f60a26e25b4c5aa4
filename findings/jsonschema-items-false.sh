#!/bin/sh
# jsonschema 4.26.0: `additionalItems` beside `"items": false` raises TypeError instead of a verdict (draft 6, draft 7).
#
# Since draft 6 `true` and `false` are schemas, so `{"items": false, "additionalItems": true}` is a valid one: its
# metaschema says so, and `additionalItems` says nothing, because `items` is no list. jsonschema takes the length of it.
#
# Seen with: jsonschema 4.26.0, Python 3.11. Prints what it says, and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check jsonschema==4.26.0
"$folder/env/bin/python" - <<'PYTHON'
import jsonschema

for draft in (jsonschema.Draft6Validator, jsonschema.Draft7Validator):
    schema = {"items": False, "additionalItems": True}
    draft.check_schema(schema)
    assert draft({"items": False}).is_valid([])
    try:
        said = draft(schema).is_valid([])
    except TypeError as error:
        said = f"TypeError: {error}"
    print(f"{draft.__name__}, {schema}, []: {said}")
    assert said == "TypeError: object of type 'bool' has no len()"
PYTHON
