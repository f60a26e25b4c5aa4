"""The values of the Helm chart that say how engines are formed, as `orca topology --values FILE` reads them.

The chart computes the same from them (helm/templates); its tests compare the two.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import yaml

from orca_common.errors import FailedPrecondition
from orca_local.stack import DEMO_MODEL
from orca_scheduler.lifecycle.places import Shape

IN_THE_IMAGES = "/opt/orca/demo_model"  # where they have the demo model
# The chart's values at the top; helm refuses all others.
NAMES = """
apiKeys check commonAnnotations commonLabels endpoint engine extraObjects fullnameOverride gateway global host image
ingress jaeger metrics model nameOverride networkPolicy pod redis revisionHistoryLimit scheduler sentinel test tls
tracing ui wait worker
"""
VALUES = frozenset(NAMES.split())
# Names that values of `engine` had when they stood at the top, and those of today.
SAME = ("tp", "pp", "gpusPerPod", "gpusPerNode", "dtype", "device", "gpuResource", "slots", "placement")
MOVED = {"engines": "count"} | {name: name for name in SAME}
SOURCES = ("path", "claim", "download", "image", "hub")
ONE_SOURCE = "model: exactly one of path, claim, download, image and hub says where the checkpoint is"


@dataclass(frozen=True, slots=True)
class EngineValues:
    """The engines of a release."""

    tp: int = 1
    pp: int = 1
    engines: int = 1
    gpus_per_pod: int | None = None
    gpus_per_node: int | None = None
    dtype: str = "auto"
    quantize: str | None = None
    kv_dtype: str | None = None
    source: str = ""  # one of SOURCES; "" when none is given
    model: str | None = None  # the folder or the hub's name, if it can be read from this machine

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """These values, and over them what the command line gives (None: not given)."""
        return replace(self, **{name: value for name, value in options.items() if value is not None})

    def settings(self) -> dict[str, Any]:
        """As settings of `orca serve`. Raises FailedPrecondition if the checkpoint is not on this machine."""
        if not self.source and self.model is None:
            raise FailedPrecondition(f"{ONE_SOURCE}; none is given")
        if self.model is None:
            raise FailedPrecondition(
                f"model: the checkpoint of model.{self.source} is not on this machine; --model names a copy of it"
            )
        self.shape()
        types = {"dtype": self.dtype, "quantize": self.quantize, "kv_dtype": self.kv_dtype}
        return {"model": self.model, "tp": self.tp, "pp": self.pp, **types}

    def shape(self) -> Shape:
        """The shape of each engine. Raises FailedPrecondition with the chart's sentence."""
        per_pod = self.gpus_per_pod or self.tp
        if self.tp % per_pod:
            raise FailedPrecondition(f"engine.gpusPerPod: {per_pod} is no divisor of tp, {self.tp}")
        if self.gpus_per_node is not None and per_pod > self.gpus_per_node:
            raise FailedPrecondition(
                f"engine.gpusPerPod: a pod of {per_pod} ranks fits on no node, "
                f"which has {self.gpus_per_node} GPUs (gpusPerNode)"
            )
        return Shape(self.tp, self.pp, per_pod, block_size=1)


def read_values(files: Iterable[Path]) -> EngineValues:
    """The values in files as `helm install -f` takes them: later files win, and maps are merged.

    Raises FailedPrecondition with a sentence for a file that cannot be read, and for a wrong value.
    """
    values: dict[str, Any] = {}
    for file in files:
        try:
            found = yaml.safe_load(file.read_text())
        except OSError as error:
            raise FailedPrecondition(f"--values: {file} cannot be read ({error.strerror})") from None
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            raise FailedPrecondition(f"--values: {file} cannot be read as YAML ({error})") from None
        if not isinstance(found, dict | None):
            raise FailedPrecondition(f"--values: {file} holds no map of values")
        old = [name for name, value in (found or {}).items() if name in MOVED and value is not None]
        if old:
            new = ", ".join(f"engine.{MOVED[name]}" for name in old)
            raise FailedPrecondition(f"--values: {file}: {', '.join(old)}: named {new} now")
        unknown = next((name for name in found or {} if name not in VALUES | MOVED.keys()), None)
        if unknown is not None:
            raise FailedPrecondition(f"--values: {file}: {unknown}: the chart has no such value")
        values = _merged(values, found or {})
    source, model = _model(values.get("model") or {})
    engine = values.get("engine") or {}
    return EngineValues(
        tp=_count(engine, "tp") or 1,
        pp=_count(engine, "pp") or 1,
        engines=1 if (engines := _count(engine, "count", least=0)) is None else engines,
        gpus_per_pod=_count(engine, "gpusPerPod"),
        gpus_per_node=_count(engine, "gpusPerNode"),
        dtype=str(engine.get("dtype", "auto")),
        quantize=engine.get("quantize"),
        kv_dtype=engine.get("kvDtype"),
        source=source,
        model=model,
    )


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(below)
    for name, value in above.items():
        deeper = isinstance(value, dict) and isinstance(both.get(name), dict)
        both[name] = _merged(both[name], value) if deeper else value
    return both


def _count(engine: Mapping[str, Any], name: str, least: int = 1) -> int | None:
    value = engine.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise FailedPrecondition(f"engine.{name}: a whole number of at least {least} is needed, it is {value!r}")
    return value


def _model(model: Mapping[str, Any]) -> tuple[str, str | None]:
    """The kind of the source, and the folder or hub name that stands for it on this machine, if any does."""
    given = [kind for kind in SOURCES if model.get(kind)]
    if len(given) > 1:
        raise FailedPrecondition(f"{ONE_SOURCE}; {' and '.join(given)} are given")
    match given:
        case ["path"] if Path(model["path"]).is_dir():
            return "path", str(model["path"])
        case ["path"] if model["path"] == IN_THE_IMAGES:
            return "path", str(DEMO_MODEL)
        case ["hub"]:
            return "hub", str(model["hub"]["name"])
        case [kind]:
            return kind, None
        case _:
            return "", None
