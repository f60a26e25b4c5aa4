"""The images: they can be fetched, and all of Orca's are of one version."""

from .finding import Finding, fault, listing, ok, warning
from .objects import Object, at, image_tag, name_of, pod_template, service_container
from .pods import PULLS, container_statuses, known, shortened
from .snapshot import Snapshot

OURS = ("endpoint", "scheduler", "worker")


def tags(snapshot: Snapshot) -> list[Finding]:
    """Endpoint, scheduler and worker come from one build: their images have the same tag."""
    found = {}
    for component in OURS:
        if workload := snapshot.release.workload(component):
            found[component] = image_tag(str(service_container(pod_template(workload)).get("image", "")))
    if len(set(found.values())) > 1:
        said = ", ".join(f"{component} {tag}" for component, tag in found.items())
        advice = "give all the tag of one build, by image.tag; a mixture is for the time of an upgrade"
        return [warning("tags", f"the images differ: {said}", advice)]
    tag = next(iter(found.values()), "")
    if tag == "latest":
        advice = "give image.tag, so that an upgrade is a change and a rollback leads back"
        return [warning("tags", "the images have the tag latest, or none", advice)]
    return [ok("tags", f"all images are {tag}")]


def pulls(snapshot: Snapshot) -> list[Finding]:
    """No node fails to fetch an image."""
    failing: dict[tuple[str, str], list[Object]] = {}
    for pod in known(snapshot):
        for status in container_statuses(pod):
            waiting = at(status, "state", "waiting") or {}
            if waiting.get("reason") in PULLS:
                message = shortened(str(waiting.get("message", waiting["reason"])), 100)
                failing.setdefault((str(status.get("image")), message), []).append(pod)
    advice = "look at the name, the tag and image.pullSecrets"
    return [
        fault("pulls", f"{listing([name_of(pod) for pod in pods])} cannot fetch {image}: {message}", advice)
        for (image, message), pods in failing.items()
    ] or [ok("pulls", "no node fails to fetch an image")]
