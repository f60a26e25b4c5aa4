"""Whatever somebody writes into the values: what is rendered is taken by an API server, or a sentence says why not."""

import random
from collections.abc import Iterator
from functools import cache

import pytest
from helm.chart import DEMO, SERVICES, Object, Rendered, merged, render
from helm.odd import NAMES, a_file_with, a_values_file, places
from helm.strict import faults
from helm_python import HelmRenderError, HelmValuesError
from kubernetes_validate import utils

SENTENCE = "execution error at (orca/"  # how Helm begins with a sentence of the chart; its own begin with the template
ODDEST = (None, 0, "7")  # a null removes a default, a template takes a zero for nothing, and a text may render a number
LONGEST = 400  # characters of a sentence, with odd values in it


@pytest.fixture(scope="module", autouse=True)
def _schemas_are_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", cache(utils.schema_contents))
        yield


def wrong(name: str, values: Object) -> list[str]:
    """Returns what is wrong with the chart's answer to a values file: nothing, if it is refused by a sentence."""
    try:
        release = render(values, name)
    except HelmValuesError:
        return []
    except HelmRenderError as error:
        return [] if SENTENCE in str(error) and len(str(error)) < LONGEST else [str(error)]
    found = [f"{thing['kind']}: {fault}" for thing in release.objects for fault in faults(thing)]
    return found or [*_dropped(release, values)]


def _dropped(release: Rendered, values: Object) -> Iterator[str]:
    """Zeros above all: a template takes them for nothing."""
    for service in SERVICES:
        given = values.get(service) or {}
        environment = release.environment(service)
        drain = float(environment.get("ORCA_DRAIN_SECONDS", "30"))
        if drain != given.get("drainSeconds", 30):
            yield f"{service} drains for {drain} s"
        if release.pods[service]["spec"]["terminationGracePeriodSeconds"] < drain + 10:
            yield f"{service} is killed in its drain of {drain} s"
        for name in given.get("settings") or {}:
            if f"ORCA_{name.upper()}" not in environment and given["settings"][name] is not None:
                yield f"{service} is not told {name}"


MORE = [pytest.param(range(n, n + 100), marks=pytest.mark.long) for n in range(40, 2040, 100)]


@pytest.mark.parametrize("seeds", [range(40), *MORE], ids=str)
def test_random_values(seeds: range) -> None:
    found = {}
    for seed in seeds:
        name, values = a_values_file(random.Random(seed))
        if faults_of := wrong(name, values):
            found[seed] = (faults_of[0], name, values)
    assert not found


@pytest.mark.parametrize("block", ["probes", "serviceAccount"])
def test_a_null_for_all_pods_is_as_if_nothing_were_given(block: str) -> None:
    assert render(merged(DEMO, {"pod": {block: None}})).objects == render(DEMO).objects


def test_odd_names_of_releases() -> None:
    found = {name: faults_of[0] for name in NAMES if (faults_of := wrong(name, DEMO))}
    assert not found


@pytest.mark.long
@pytest.mark.parametrize("block", sorted({path[0] for path in places()}))
def test_the_oddest_values_in_each_place(block: str) -> None:
    """Of 2,000 random files one had a null in the ten places where it once broke a template."""
    found = {}
    for path in places():
        for value in ODDEST if path[0] == block else ():
            if faults_of := wrong("orca", a_file_with(path, value)):
                found[path, value] = faults_of[0]
    assert not found
