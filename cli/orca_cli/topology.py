"""Shows for `orca topology` which rank of an engine holds what, by the rules of the partition."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from orca_common.checkpoint import Checkpoint
from orca_scheduler.lifecycle.places import Place, Shape
from orca_worker.partition import RankShare

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def rank_table(checkpoint: Checkpoint, shares: Sequence[RankShare], tp: int, pp: int, types: str) -> Table:
    """One line per rank: its place, its layers, the tensors that it holds (a part of), and their bytes."""
    total = sum(share.weight_bytes for share in shares)
    table = Table(title=Text(f"{checkpoint.name}, tp {tp} x pp {pp}, {types}"), title_justify="left")
    columns = ("rank", "stage", "tensor rank", "layers", "tensors", "weights", "share", "one slot (K/V)")
    for column in columns:
        table.add_column(column, justify="left" if column == "layers" else "right")
    for number, share in enumerate(shares):
        table.add_row(
            str(number),
            str(share.stage),
            str(share.tensor_rank),
            span(share.layers),
            str(len(share.slices)),
            size(share.weight_bytes),
            f"{share.weight_bytes / total:.1%}" if total else "-",
            size(share.slot_bytes),
            end_section=share.tensor_rank == tp - 1,
        )
    return table


def slice_table(shares: Sequence[RankShare]) -> Table:
    """One line per tensor of a rank: the whole shape, the axis that is cut, and the ranges that the rank keeps."""
    table = Table(title="slices", title_justify="left")
    for column in ("rank", "tensor", "of", "axis", "keeps", "shape here"):
        table.add_column(column, justify="right" if column in ("rank", "axis") else "left", overflow="fold")
    for number, share in enumerate(shares):
        for name, part in share.slices.items():
            kept = ", ".join(f"{r.start}:{r.stop}" for r in part.ranges)
            whole = part.size == part.shape
            table.add_row(
                str(number),
                name,
                shape(part.shape),
                "-" if whole else str(part.axis),
                "all" if whole else kept,
                shape(part.size),
            )
        table.add_section()
    return table


class PodOfEngine(NamedTuple):
    """A worker pod of a release, and the ranks that it holds, in their order."""

    ordinal: int
    engine: str
    places: tuple[Place, ...]


def pods_of(shape: Shape, engines: int) -> Iterator[PodOfEngine]:
    """The pods of the worker StatefulSet: ordinal o belongs to engine o // shape.pods."""
    for ordinal in range(engines * shape.pods):
        engine, pod = divmod(ordinal, shape.pods)
        places = tuple(place for place in shape.places() if place.pod == pod)
        yield PodOfEngine(ordinal, f"engine-{engine}", places)


def pod_table(shape: Shape, engines: int) -> Table:
    """One line per worker pod: its engine, and which ranks it holds. A rank's number is that of `rank_table`."""
    table = Table(title=f"{engines * shape.pods} worker pods of {shape.ranks_per_pod} ranks", title_justify="left")
    for column in ("pod", "engine", "stage", "tensor ranks", "ranks"):
        table.add_column(column, justify="right" if column == "stage" else "left")
    for pod in pods_of(shape, engines):
        stage, first = pod.places[0].stage, pod.places[0].tensor_rank
        tensor_ranks = range(first, first + len(pod.places))
        ranks = range(stage * shape.tp + first, stage * shape.tp + first + len(pod.places))
        last = pod.ordinal % shape.pods == shape.pods - 1
        cells = (f"orca-worker-{pod.ordinal}", pod.engine, str(stage), span(tensor_ranks), span(ranks))
        table.add_row(*cells, end_section=last)
    return table


def span(numbers: range) -> str:
    if not numbers:
        return "-"
    return str(numbers.start) if len(numbers) == 1 else f"{numbers.start} to {numbers.stop - 1}"


def shape(sizes: Sequence[int]) -> str:
    return f"({', '.join(map(str, sizes))})"


def size(count: int) -> str:
    """Bytes in the largest fitting unit: 1536 is 1.5 KiB."""
    value = float(count)
    for unit in UNITS[:-1]:
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {UNITS[-1]}"
