#!/bin/sh
# best-effort-json-parser 1.5.1: as long as a text is unfinished, 1e3 in it is 1, and the next key is another one.
#
# Guess before: a parser of unfinished JSON, which shows a call's arguments while they are streamed, guesses at the
# last value and reads those before it as JSON has them. A number ends for this one at its exponent, wherever it
# stands: what follows, `e3,` and the next name, becomes one key, so the page shows members that the schema does not
# have. Within a list the rest of the number is a text of its own. When the last brace is there all is right, since
# the whole is then read by `JSON.parse`. An escape cut in two, as `\u00`, is an error, not the text before it.
# partial-json 0.1.7 reads all of them.
# Orca streams the arguments of a call token by token, and a schema's `number` allows exponents.
#
# Seen with: best-effort-json-parser 1.5.1, partial-json 0.1.7, Node 20.20. Prints what both read, and fails when that
# changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$folder" best-effort-json-parser@1.5.1 partial-json@0.1.7
cat > "$folder/read.mjs" <<'NODE'
import assert from "node:assert/strict";
import { disableErrorLogging, parse } from "best-effort-json-parser";
import { parse as partial } from "partial-json";

disableErrorLogging();
const read = (parser, text) => {
  try {
    return parser(text);
  } catch (error) {
    return error.constructor.name;
  }
};
for (const [text, best, other] of [
  ['{"mass": 1000, "unit": "kg"', { mass: 1000, unit: "kg" }, { mass: 1000, unit: "kg" }],
  ['{"mass": 1e3, "unit": "kg"', { mass: 1, 'e3, "unit"': "kg" }, { mass: 1000, unit: "kg" }],
  ['{"mass": 1e3, "unit": "kg"}', { mass: 1000, unit: "kg" }, { mass: 1000, unit: "kg" }],
  ['{"mass": 2.5e-3, "unit": "kg"', { mass: 2.5, 'e-3, "unit"': "kg" }, { mass: 0.0025, unit: "kg" }],
  ["[1e3, 2e3", [1, "e3", 2, "e3"], [1000, 2000]],
  ['{"name": "gr\\u00fcn', { name: "grün" }, { name: "grün" }],
  ['{"name": "gr\\u00', "SyntaxError", { name: "gr" }],
]) {
  const found = [read(parse, text), read(partial, text)];
  console.log(`${text}: best-effort-json-parser ${JSON.stringify(found[0])}; partial-json ${JSON.stringify(found[1])}`);
  assert.deepEqual({ ...found }, { 0: best, 1: other });
}
NODE
node "$folder/read.mjs"
