"""The chart. Its templates are no Python, so these hang on their text."""

from mutations.changes import Text
from mutations.mutation import Mutation

TEMPLATES = "helm/templates"
OBJECTS = "tests/helm/test_objects.py"

MUTATIONS = [
    Mutation(
        "cert-manager's certificates are of servers alone",
        f"{TEMPLATES}/_helpers.tpl",
        "",
        Text("[server auth, client auth]", "[server auth]"),
        f"{OBJECTS}::test_with_certificates_every_connection_is_mtls",
    ),
    Mutation(
        "the grace leaves no time to be forgotten",
        f"{TEMPLATES}/endpoint-deployment.yaml",
        "",
        Text("add $endpoint.forgetSeconds $endpoint.drainSeconds 15", "add $endpoint.drainSeconds 15"),
        f"{OBJECTS}::test_an_orderly_end_fits_the_grace_period",
    ),
]
