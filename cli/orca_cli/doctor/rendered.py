"""Reads a rendered chart: what `helm template` prints."""

from pathlib import Path

import yaml

from orca_common.errors import FailedPrecondition

from .objects import INSTANCE, Object, Release, at


def read_rendered(path: Path, name: str | None) -> Release:
    """The release in a file of YAML documents; "-" is stdin. `name`: which one, when the file holds several.

    Raises FailedPrecondition when it is no such file.
    """
    try:
        text = Path("/dev/stdin" if str(path) == "-" else path).read_text()
        documents = list(yaml.safe_load_all(text))
    except OSError as error:
        raise FailedPrecondition(f"--rendered: {path} cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise FailedPrecondition(f"--rendered: {path} cannot be read as YAML ({said})") from None
    if not text.strip():
        raise FailedPrecondition(f"--rendered: {path} is empty")
    objects = [thing for document in documents for thing in flattened(document)]
    names = sorted({str(found) for thing in objects if (found := at(thing, "metadata", "labels", INSTANCE))})
    if name is None and len(names) > 1:
        raise FailedPrecondition(f"--rendered: {path} holds the releases {', '.join(names)}; name one by --release")
    name = name or next(iter(names), "orca")
    mine = tuple(thing for thing in objects if at(thing, "metadata", "labels", INSTANCE) == name)
    return Release(name, str(at(mine[0], "metadata", "namespace") or "") if mine else "", mine)


def flattened(document: object) -> list[Object]:
    """The objects of a document; a List has several."""
    if not isinstance(document, dict):
        return []
    return [thing for item in document["items"] for thing in flattened(item)] if "items" in document else [document]
