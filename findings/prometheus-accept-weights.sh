#!/bin/sh
# prometheus_client 0.26.0: a scraper that refuses OpenMetrics with `q=0` gets OpenMetrics.
#
# A scraper weighs the formats that it reads in `Accept`, and by HTTP's rules 0 means "not this one". `choose_encoder`,
# which the library's servers and WSGI and ASGI applications ask, does not read weights: wherever OpenMetrics is named, it
# is sent. To a reader of the text format that is another page: the library's own parser finds no sample of a counter in
# it, and takes the time of an exemplar for that of the sample.
#
# Seen with: prometheus_client 0.26.0, Python 3.11. Prints the formats, and fails when a weight counts.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check prometheus_client==0.26.0
"$folder/env/bin/python" - <<'PYTHON'
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families

TEXT, OPEN = "text/plain", "application/openmetrics-text"


def sent(accept):
    kind = choose_encoder(accept)[1]
    print(f"Accept: {accept:90} Content-Type: {kind}")
    return kind.partition(";")[0]


assert sent("*/*") == TEXT
assert sent(f"{OPEN};version=1.0.0;q=0.5,{TEXT};version=0.0.4;q=0.3") == OPEN
assert sent(f"{TEXT};version=0.0.4;q=0.5,{OPEN};version=1.0.0;q=0.3") == OPEN  # the text is wanted more
REFUSED = f"{TEXT};version=0.0.4,{OPEN};version=1.0.0;q=0"
assert sent(REFUSED) == OPEN

registry = CollectorRegistry()
Counter("tokens", "made", registry=registry).inc(5, exemplar={"trace": "a"})


def read(accept):
    """Samples of the counter by the text format's parser: values, and whether each has a time."""
    families = text_string_to_metric_families(choose_encoder(accept)[0](registry).decode())
    counter = next(family for family in families if family.type == "counter")
    others = [sample for family in families if family.name == "tokens_total" for sample in family.samples]
    return [[(one.value, one.timestamp is not None) for one in found] for found in (counter.samples, others)]


print("a counter and what else has its name:", read("*/*"), "and, refused,", read(REFUSED))
assert read("*/*") == [[(5.0, False)], []]
assert read(REFUSED) == [[], [(5.0, True)]]
PYTHON
