"""Who may import whom: the rules of docs/change.md, "Who may import whom", checked on every import."""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOME = {  # import package -> the folder that holds it
    "orca": "protos",
    "orca_common": "services/common",
    "orca_pool": "services/pool",
    "orca_endpoint": "services/endpoint",
    "orca_scheduler": "services/scheduler",
    "orca_worker": "services/worker",
    "orca_ui": "services/ui",
    "orca_kernels": "kernels",
    "orca_client": "client",
    "orca_lab": "lab",
    "orca_local": "local",
    "orca_bench": "bench",
    "orca_chaos": "chaos",
    "orca_cli": "cli",
}
PURE = ("core", "lifecycle", "timers", "share", "scaling")  # of orca_scheduler
WORKER = (  # rooms of orca_worker, the lowest first
    *("settings", "machine", "partition", "processes", "data_plane"),
    *("iteration", "sampling", "device", "models", "stage", "rank", "pod", "__main__"),
)
IMPURE = {  # modules of the standard library with a clock, chance or the world in them
    *("asyncio", "concurrent", "contextvars", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "queue"),
    *("random", "sched", "secrets", "select", "selectors", "shutil", "signal", "socket", "subprocess", "sys"),
    *("tempfile", "threading", "time", "uuid"),
}


# The rooms of orca_endpoint -> the modules below that each may import, and the libraries that it may not.
GRPC, HTTP = ("grpc", "grpc_reflection"), ("starlette", "uvicorn")
ENDPOINT_ROOMS = {
    "text": ((), (*GRPC, *HTTP)),
    "requests": (("settings", "text"), (*GRPC, *HTTP)),
    "calls": (("settings", "text", "requests"), (*GRPC, *HTTP)),
    "grpc": (("settings", "requests", "calls"), HTTP),
    "http": (("settings", "requests", "calls"), GRPC),
    "openai": (("text", "requests", "calls", "http"), GRPC),
    "anthropic": (("text", "requests", "calls", "http", "openai"), GRPC),
    "ollama": (("text", "requests", "calls", "http", "openai"), GRPC),
    "api": (("calls", "http", "openai", "anthropic", "ollama"), GRPC),
}
READERS = ("settings.py", "environment.py")  # what may read the environment


@dataclass(frozen=True)
class Import:
    """`module` is absolute: `from .core import X` in orca_scheduler is `orca_scheduler.core`, with `name` X."""

    path: Path
    line: int
    module: str
    name: str | None = None

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    def within(self, *modules: str) -> bool:
        """Whether it is one of these modules, or of what is in them."""
        full = f"{self.module}.{self.name}" if self.name else self.module
        return any(full == module or full.startswith(f"{module}.") for module in modules)

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.module}"


@dataclass(frozen=True)
class Rule:
    """`allows` judges one import of a module that the rule is about; `about` is the folder or the modules."""

    sentence: str
    package: str
    allows: Callable[[Import], bool]
    modules: tuple[str, ...] | None = None  # rooms, or modules without .py; None: all of the package


def ours(found: Import, *allowed: str) -> bool:
    """Of our own packages only these (and itself, which each rule adds)."""
    return found.top not in HOME or found.within(*allowed)


def third_party(found: Import, *allowed: str) -> bool:
    return found.top in HOME or found.top in sys.stdlib_module_names or found.within(*allowed)


def in_room(found: Import, room: str, below: tuple[str, ...], banned: tuple[str, ...]) -> bool:
    """Of the endpoint only the room itself and these below it, and none of these libraries."""
    if found.top == "orca_endpoint":
        return found.within(*(f"orca_endpoint.{name}" for name in (room, *below)))
    return not found.within(*banned)


RULES = [
    Rule("orca_common imports nothing of ours but orca.v1", "orca_common", lambda i: ours(i, "orca_common", "orca.v1")),
    Rule(
        "orca_pool -> orca_common, orca.v1",
        "orca_pool",
        lambda i: ours(i, "orca_pool", "orca_common", "orca.v1"),
    ),
    Rule(
        "orca_endpoint -> orca_pool, orca_common, orca.v1; never torch, never orca_scheduler or orca_worker",
        "orca_endpoint",
        lambda i: ours(i, "orca_endpoint", "orca_pool", "orca_common", "orca.v1") and not i.within("torch"),
    ),
    Rule(
        "orca_scheduler -> orca_pool, orca_common, orca.v1; never torch",
        "orca_scheduler",
        lambda i: ours(i, "orca_scheduler", "orca_pool", "orca_common", "orca.v1") and not i.within("torch"),
    ),
    Rule(
        "kubernetes is imported only in orca_scheduler/discovery/kubernetes.py",
        "orca_scheduler",
        lambda i: (
            not i.within("kubernetes", "kubernetes_asyncio") or i.path.parts[-2:] == ("discovery", "kubernetes.py")
        ),
    ),
    Rule(
        "orca_worker -> orca_kernels, orca_common, orca.v1; never kubernetes",
        "orca_worker",
        lambda i: ours(i, "orca_worker", "orca_kernels", "orca_common", "orca.v1") and not i.within("kubernetes"),
    ),
    Rule(
        "orca_ui -> orca_common; it reads schedulers and calls an endpoint over HTTP alone",
        "orca_ui",
        lambda i: ours(i, "orca_ui", "orca_common") and not i.within("torch", "grpc"),
    ),
    Rule(
        "orca_kernels -> torch, triton, numpy; nothing of ours",
        "orca_kernels",
        lambda i: ours(i, "orca_kernels") and third_party(i, "torch", "triton", "numpy"),
    ),
    Rule(
        "orca_client -> orca.v1; grpcio, protobuf and google.rpc, and opentelemetry for the caller's tracer",
        "orca_client",
        lambda i: (
            ours(i, "orca_client", "orca.v1")
            and third_party(i, "grpc", "google.protobuf", "google.rpc", "opentelemetry")
        ),
    ),
    Rule(
        "orca_lab -> the scheduler's pure core, journal, members, app and settings, orca_worker, orca_kernels, "
        "orca_client, orca_common, orca.v1",
        "orca_lab",
        lambda i: ours(
            i,
            *("orca_lab", "orca_worker", "orca_kernels", "orca_client", "orca_common", "orca.v1"),
            "orca_scheduler.master.journal",
            *(f"orca_scheduler.{name}" for name in (*PURE, "ranks.members", "app", "settings")),
        ),
    ),
    Rule(
        "orca_local -> orca_common, orca.v1, orca_pool.reach, and of the services, which are its processes, only their "
        "settings, the worker's fork server, its table of model families and what it needs of a machine",
        "orca_local",
        lambda i: ours(
            i,
            *("orca_local", "orca_common", "orca.v1", "orca_pool.reach"),
            *(f"orca_worker.processes.{name}" for name in ("beginning", "forks", "process")),
            *("orca_worker.models.families", "orca_worker.machine"),
            *(f"{service}.settings" for service in ("orca_endpoint", "orca_scheduler", "orca_worker", "orca_ui")),
        ),
    ),
    Rule(
        "orca_bench -> the scheduler's pure core, journal and its memory, and members, "
        "orca_worker, orca_kernels, orca_local, orca_lab, orca_client, orca_pool, orca_common, orca.v1; never orca_cli",
        "orca_bench",
        lambda i: ours(
            i,
            *("orca_bench", "orca_worker", "orca_kernels", "orca_local", "orca_lab", "orca_client", "orca_pool"),
            *("orca_common", "orca.v1"),
            *("orca_scheduler.master.journal", "orca_scheduler.master.recent"),
            *(f"orca_scheduler.{name}" for name in (*PURE, "ranks.members")),
        ),
    ),
    Rule(
        "orca_chaos -> orca_pool, orca_local, the scheduler's pure core and journal, orca_common, orca.v1; never "
        "orca_client",
        "orca_chaos",
        lambda i: ours(
            i,
            *("orca_chaos", "orca_pool", "orca_local", "orca_scheduler.master.journal", "orca_common", "orca.v1"),
            *(f"orca_scheduler.{name}" for name in PURE),
        ),
    ),
    Rule(
        "the scheduler's core and lifecycle, its timers, its share and its scaling import the standard library, each "
        "other, orca_common.reservation and the words of .protocol only: no clock, no I/O, no protobuf",
        "orca_scheduler",
        lambda i: (
            i.within(
                "orca_common.reservation",
                "orca_common.protocol",
                *(f"orca_scheduler.{name}" for name in PURE),
            )
            or (i.top in sys.stdlib_module_names and i.top not in IMPURE)
        ),
        modules=PURE,
    ),
    Rule(
        "the scheduler's explain imports its pure modules, its journal, orca_pool.records, orca_common.reservation and "
        "msgspec: no clock, no I/O",
        "orca_scheduler",
        lambda i: (
            i.within("orca_scheduler.master.journal", "orca_pool.records", "orca_common.reservation", "msgspec")
            or i.within("orca_scheduler.explain", *(f"orca_scheduler.{name}" for name in PURE))
            or (i.top in sys.stdlib_module_names and i.top not in IMPURE)
        ),
        modules=("explain",),
    ),
    *[
        Rule(
            f"the worker's {room} imports only rooms below it: {', '.join(WORKER[:floor])}",
            "orca_worker",
            lambda i, below=WORKER[: floor + 1]: (
                i.top != "orca_worker" or i.within(*(f"orca_worker.{name}" for name in below))
            ),
            modules=(room,),
        )
        for floor, room in enumerate(WORKER)
    ],
    *[
        Rule(
            f"orca_endpoint.{room} -> {', '.join(below) or 'no other room'}; {', '.join(banned)} never",
            "orca_endpoint",
            partial(in_room, room=room, below=below, banned=banned),
            modules=(room,),
        )
        for room, (below, banned) in ENDPOINT_ROOMS.items()
    ],
    *[
        Rule("orca_pool is the only importer of redis", package, lambda i: not i.within("redis", "valkey"))
        for package in HOME
        if package != "orca_pool"
    ],
]


def sources(root: Path, package: str) -> Iterator[Path]:
    for path in sorted((root / HOME[package] / package).rglob("*.py")):
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
            yield path


def imports(path: Path, home: Path) -> Iterator[Import]:
    """All imports of a file, also inside functions, as absolute names. `home` is the folder that holds its package."""
    here = path.relative_to(home).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(path, node.lineno, alias.name)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = [*here[: len(here) - level], *([module] if module else [])] if level else [module or ""]
                for alias in names:
                    yield Import(path, node.lineno, ".".join(base), alias.name)


def violations(root: Path, rule: Rule) -> list[str]:
    found = []
    for path in sources(root, rule.package):
        room = path.relative_to(root / HOME[rule.package] / rule.package).parts[0].removesuffix(".py")
        if rule.modules is None or room in rule.modules:
            found += [str(i) for i in imports(path, root / HOME[rule.package]) if not rule.allows(i)]
    return sorted(set(found))


def modules(root: Path) -> dict[str, tuple[Path, Path]]:
    """Every module of ours by its full name: its file, and the folder that holds its package."""
    found = {}
    for package, home in HOME.items():
        for path in sources(root, package):
            parts = path.relative_to(root / home).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path, root / home
    return found


def import_graph(root: Path) -> dict[str, set[str]]:
    """Each module of ours -> those that it imports, in functions and under TYPE_CHECKING too.

    Whoever imports `a.b.c` also imports the packages `a` and `a.b`, unless it is in them itself: these have been begun
    before it.
    """
    files = modules(root)
    graph: dict[str, set[str]] = {}
    for name, (path, home) in files.items():
        graph[name] = set()
        for found in imports(path, home):
            full = f"{found.module}.{found.name}"
            target = full if full in files else found.module
            parts = target.split(".")
            around = {".".join(parts[:end]) for end in range(1, len(parts))}
            graph[name] |= {package for package in around if not f"{name}.".startswith(f"{package}.")} | {target}
        graph[name] = (graph[name] & files.keys()) - {name}
    return graph


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of modules of which each imports each other, directly or not."""
    rest = {name: set(imported) for name, imported in graph.items()}
    while ends := {name for name, imported in rest.items() if not imported & rest.keys()}:
        rest = {name: imported for name, imported in rest.items() if name not in ends}

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            new = (rest[todo.pop()] & rest.keys()) - seen
            seen |= new
            todo += new
        return seen

    reach = {name: reached(name) for name in rest}
    groups = {frozenset(other for other in reach[name] if name in reach[other]) for name in rest if name in reach[name]}
    return sorted(sorted(group) for group in groups)


def environment_readers(root: Path) -> list[str]:
    """Uses of os.environ and os.getenv outside settings.py, and what makes environments of children."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    found = []
    for path in (path for package in HOME for path in sources(root, package) if path.name not in READERS):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            match node:
                case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in names:
                    found.append(f"{path}:{node.lineno} uses os.{name}")
                case ast.ImportFrom(module="os", names=aliases):
                    found += [f"{path}:{node.lineno} imports os.{a.name}" for a in aliases if a.name in names]
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.package}: {rule.sentence}")
def test_imports(rule: Rule) -> None:
    assert not violations(ROOT, rule), rule.sentence


# What a process must not import as it starts, before it listens. Each costs a tenth of a second of a core or more, and
# the rank's torch, which every start waits for, needs one of two cores.
SLOW = {
    "torch",
    "numpy",
    "transformers",
    "triton",
    "huggingface_hub",
    "kubernetes_asyncio",
    "llguidance",
    "orca_client",
    "orca_bench",
}
DOORS = {"redis", "uvicorn", "starlette", "tokenizers", "cryptography"}
LIGHT = {"asyncio", "grpc", "json", "logging", "pydantic"}
CALLS = {"grpc", "opentelemetry"}
STARTS = {
    "orca_cli.main, orca_cli.serving": SLOW | DOORS,
    "orca_endpoint.app": SLOW,
    "orca_scheduler.app": SLOW | {"uvicorn", "tokenizers"},
    "orca_ui.app": SLOW | {"redis", "tokenizers"},
    # the fork server begins when a supervisor has imported no more
    "orca_worker.processes.beginning": SLOW | DOORS | LIGHT,
    "orca_worker.pod.supervisor": SLOW | DOORS,
    # its supervisor tells it which libraries the model needs
    "orca_worker.processes.fork_server": (SLOW | DOORS) - {"numpy"},
    "orca_worker.rank.app": (SLOW | DOORS) - {"numpy"},  # torch comes when it is known that the model needs it
    # streams wait for these where they are started again
    "orca_worker.sampling.follower": SLOW | DOORS | CALLS,
    "orca_endpoint.requests.form_compiler": SLOW | DOORS | CALLS,
    "orca_endpoint.requests.chat_renderer": (SLOW | DOORS | CALLS) - {"tokenizers"},
}


@pytest.mark.parametrize("modules", STARTS)
def test_a_start_imports_nothing_slow(modules: str) -> None:
    script = f"import {modules}, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert not STARTS[modules] & set(done.stdout.split())


def test_no_circle() -> None:
    found = [" <-> ".join(circle) for circle in circles(import_graph(ROOT))]
    assert not found, "modules import each other"


def test_every_room_of_the_worker_has_a_floor() -> None:
    found = (path for path in sources(ROOT, "orca_worker") if path.name != "__init__.py")
    assert {path.relative_to(ROOT / HOME["orca_worker"]).parts[1].removesuffix(".py") for path in found} == set(WORKER)


def test_environment() -> None:
    assert not environment_readers(ROOT), "nothing but a settings.py reads the environment"


@pytest.mark.parametrize(("package", "home"), HOME.items())
def test_homes(package: str, home: str) -> None:
    """Every package is where the rules look for it, and no folder around one is itself a package."""
    assert (ROOT / home / package / "__init__.py").is_file()
    folder = ROOT / home
    while folder != ROOT:
        assert not (folder / "__init__.py").exists(), "the folder of an import package is never itself a package"
        folder = folder.parent


def test_every_package_has_a_home() -> None:
    """A new package must be given its rules."""
    tops = {Path(home).parts[0] for home in HOME.values()}
    roots = {path.parent for top in tops for path in (ROOT / top).rglob("__init__.py")}
    packages = {folder.name for folder in roots if not (folder.parent / "__init__.py").exists()}
    assert packages == set(HOME)


def test_the_walk_itself(tmp_path: Path) -> None:
    """What the rules would miss if the walk were blind: relative, nested, aliased and star imports."""
    package = tmp_path / "services/scheduler/orca_scheduler"
    package.mkdir(parents=True)
    (package / "core.py").write_text(
        "import collections.abc as a, time\n"
        "from . import share, master\n"
        "from .timers import *\n"
        "def f():\n"
        "    if a:\n"
        "        from orca.v1 import pool_pb2\n"
        "        from os import path\n"
    )
    [rule] = [rule for rule in RULES if rule.modules == PURE]
    lines = [line.partition(":")[2] for line in violations(tmp_path, rule)]
    assert lines == ["1 imports time", "2 imports orca_scheduler", "6 imports orca.v1", "7 imports os"]
    (package / "master.py").write_text("import os\nfrom os import getenv\nprint(os.environ['A'])\n")
    (package / "settings.py").write_text("import os\nprint(os.environ['A'])\n")
    lines = [line.partition(":")[2] for line in environment_readers(tmp_path)]
    assert sorted(lines) == ["2 imports os.getenv", "3 uses os.environ"]


def test_circles_are_found(tmp_path: Path) -> None:
    """Inside functions, under TYPE_CHECKING, and through the package around a module."""
    package = tmp_path / "services/worker/orca_worker"
    for folder in ("models", "places"):
        (package / folder).mkdir(parents=True)
    files = {
        "__init__.py": "",
        "batch.py": "from .models.gpt import x\n",
        "kv.py": "def f():\n    from . import stage\n",
        "memory.py": "from .kv import x\n",
        "stage.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .memory import x\n",
        "models/__init__.py": "from ..batch import x\nfrom . import gpt\n",
        "models/gpt.py": "import orca_common.errors\n",
        "places/__init__.py": "from .place import Place\nLIMIT = 3\n",
        "places/place.py": "from . import LIMIT\n",
    }
    for name, text in files.items():
        (package / name).write_text(text)
    assert circles(import_graph(tmp_path)) == [
        ["orca_worker.batch", "orca_worker.models"],
        ["orca_worker.kv", "orca_worker.memory", "orca_worker.stage"],
        ["orca_worker.places", "orca_worker.places.place"],
    ]
