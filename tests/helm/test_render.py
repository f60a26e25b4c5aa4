"""The chart lints, and whatever it renders is valid in every Kubernetes that it is for."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import helm_python
import kubernetes_validate
import pytest
from helm.chart import DEMO, FOLDER, OPTIONS, SHAPES, merged, render, rendered
from kubernetes_validate import utils
from properties import first

VERSIONS = first(2, ("1.31", "1.36", "1.32", "1.33", "1.34", "1.35"))
FOREIGN = (
    "cert-manager.io/",
    "gateway.networking.k8s.io/",
    "monitoring.coreos.com/",
)  # whose schemas kubernetes-validate does not have
IMAGE_VOLUMES = ("1.33", "1.34", "1.35", "1.36")


@pytest.fixture(scope="module", autouse=True)
def _schemas_are_read_once() -> Iterator[None]:
    """kubernetes-validate reads a megabyte of definitions for each document: two thirds of its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", cache(utils.schema_contents))
        yield


def lint(values: dict[str, Any], version: str) -> list[str]:
    found = helm_python.lint(FOLDER, values, strict=True, kube_version=f"v{version}.0")
    assert not found["errors"], found["errors"]
    return [message["error"] for message in found["messages"] if message["severity"] > 1]


@pytest.mark.parametrize("name", OPTIONS)
def test_lint(name: str) -> None:
    assert lint(OPTIONS[name].values, "1.34") == []


@pytest.mark.parametrize("version", VERSIONS)
def test_every_document_is_valid(version: str) -> None:
    seen = set()
    for name, options in OPTIONS.items():
        if options.values["model"].get("image") and version not in IMAGE_VOLUMES:
            continue
        for document in rendered(name).objects:
            text = json.dumps(document, sort_keys=True)
            if text not in seen and not document["apiVersion"].startswith(FOREIGN):
                seen.add(text)
                kubernetes_validate.validate(document, version, strict=True)
    assert len(seen) > 50


def test_every_shape_is_valid() -> None:
    for shape in SHAPES:
        worker = render(merged(DEMO, {"engine": shape})).workloads["worker"]
        ranks = shape["count"] * shape["pp"] * shape["tp"]
        assert worker["spec"]["replicas"] == ranks / shape.get("gpusPerPod", shape["tp"])
        kubernetes_validate.validate(worker, "1.34", strict=True)


def test_notes_say_how_to_call_and_what_stays() -> None:
    notes = rendered("values-cpu.yaml").notes
    assert "Orca serves demo_model with 1 engine(s) of tp 2 x pp 2, 2 pod(s) of 2 rank(s) each." in notes
    assert "orca generate" in notes
    assert "delete pvc data-orca-redis-0" in notes
    assert "delete pvc" not in rendered("a Redis of ours").notes
    assert "the doors are open to whoever reaches them" in rendered("nothing but a model").notes
    notes = rendered("certificates from an issuer").notes
    assert "plaintext" not in notes
    assert "get secret orca-client-tls" in notes
    assert "--address localhost:50051 --tls-dir ." in notes
    assert "https://orca-endpoint.serving:8000/v1" in notes
    assert "--api-key-file" not in notes
    keys = {"apiKeys": {"secret": "keys"}}
    notes = render(merged(DEMO, keys)).notes
    assert "--address 127.0.0.1:50051 --api-key-file key" in notes
    assert '-H "Authorization: Bearer $(cat key)"' in notes
    assert "--tls-dir . --api-key-file key" in rendered("certificates from Secrets, API keys").notes
