"""The chart. Its templates are no Python, so these hang on their text."""

from mutations.changes import Text
from mutations.mutation import Mutation

TEMPLATES = "helm/templates"
OBJECTS = "tests/helm/test_objects.py"
ODD = "tests/helm/test_odd_values.py"

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
    Mutation(
        "all ranks of a pod have one port",
        f"{TEMPLATES}/worker-statefulset.yaml",
        "",
        Text("containerPort: {{ add 50100 $rank }}", "containerPort: 50100"),
        f"{OBJECTS}::test_probes_ask_the_status_port",
    ),
    Mutation(
        "models of the hub are all one",
        f"{TEMPLATES}/worker-statefulset.yaml",
        "",
        Text('"download" "image" "hub"', '"download" "image"'),
        "tests/helm/test_settings.py::test_another_source_of_the_model_is_another_model",
    ),
    Mutation(
        "spans of a collector at the usual port are dropped",
        f"{TEMPLATES}/_network.tpl",
        "",
        Text('default "4317"', 'default "4318"'),
        "tests/helm/test_network.py::test_what_is_outside_is_reached_at_its_port",
    ),
    Mutation(
        "a drain of 0 seconds is no setting",
        f"{TEMPLATES}/_helpers.tpl",
        "",
        Text('if hasKey $workload "drainSeconds"', "with $workload.drainSeconds"),
        f"{ODD}::test_the_oddest_values_in_each_place[scheduler]",
    ),
    Mutation(
        "a block that is null ends in a template",
        "helm/values.schema.json",
        "",
        Text('    "check",\n', ""),
        f"{ODD}::test_the_oddest_values_in_each_place[check]",
    ),
    Mutation(
        "a folder of a volume may be a number",
        f"{TEMPLATES}/_model.tpl",
        "",
        Text(
            "mountPath: /models, readOnly: true",
            "mountPath: /models, {{ with $volume }}subPath: {{ .path }}, {{ end }}readOnly: true",
        ),
        f"{ODD}::test_the_oddest_values_in_each_place[model]",
    ),
    Mutation(
        "Services may have any name",
        f"{TEMPLATES}/_checks.tpl",
        "",
        Text('regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name', 'regexMatch "." $name'),
        f"{ODD}::test_odd_names_of_releases",
    ),
]
