"""Checks and reads the tensors of matrices that another tool has quantized, without torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from orca_common.errors import FailedPrecondition

from ..partition import Slice
from .formats.pieces import ALL, IN, OUT, Array, Axis, Codes, Layout, Piece, Read
from .header import BITS, Stored, broken, header_of
from .recording import Recording
from .weight_files import missing, read_runs, weight_files

NUMBERS = ("F16", "BF16", "F32", "F64")  # types of matrices that are in no codes
MAX_INPUTS = 1 << 20  # of a matrix, whatever config.json says: each has its group's number in memory
STEPS = (128, 64, 32)  # inputs that share a scale in the kernels (`formats/grouped.py`)


class Part(NamedTuple):
    """The outputs and inputs of a matrix that a rank has: all of one kind, and a part of the other."""

    stem: str  # of the names of its tensors
    outputs: int  # of the whole
    inputs: int
    outs: Sequence[range]
    ins: Sequence[range]
    is_transposed: bool  # as other matrices of the model, which are no codes

    @property
    def at_inputs(self) -> Array:
        """The places of the rank's inputs in the whole matrix, in its order."""
        return np.concatenate([np.arange(one.start, one.stop) for one in self.ins])


def part_of(part: Slice, transposed: bool) -> Part:
    """`transposed`: whether the model's other tensors of the kind are kept as [in, out]."""
    outputs, inputs = part.shape[::-1] if transposed else part.shape
    is_along_inputs = (part.axis == 1) != transposed
    outs = (range(outputs),) if is_along_inputs else part.ranges
    ins = part.ranges if is_along_inputs else (range(inputs),)
    return Part(part.name.removesuffix(".weight"), outputs, inputs, outs, ins, transposed)


class Place(NamedTuple):
    """A tensor in one of the files."""

    file: Path
    tensor: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        """A number alone is a row of one."""
        return self.tensor.shape or (1,)


class CodedFiles:
    """The tensors of a checkpoint's files. Raises FailedPrecondition for files that are missing or wrong.

    Names in the files may begin with `prefix`.
    """

    def __init__(self, folder: Path, prefix: str, layout: Layout) -> None:
        self.layout, self._folder, self._prefix = layout, folder, prefix
        self._places: dict[str, Place] = {}
        for file in weight_files(folder):
            try:
                self._places |= {name: Place(file, tensor) for name, tensor in header_of(file).tensors.items()}
            except FileNotFoundError:
                raise missing(folder, file.name) from None

    def _place(self, name: str) -> Place | None:
        return self._places.get(name) or self._places.get(self._prefix + name)

    def has(self, part: Part) -> bool:
        """Whether the matrix is in codes: some layers may be left as they were."""
        end, piece = next(iter(self.layout.pieces(part.outputs, part.inputs).items()))
        place = self._place(part.stem + end)
        return place is not None and place.tensor.kind in piece.kinds

    def find(self, part: Part) -> Mapping[str, tuple[Piece, Place]]:
        """The tensors of a matrix. Raises FailedPrecondition where one is missing, or has another type or shape."""
        found = dict[str, tuple[Piece, Place]]()
        for end, piece in self.layout.pieces(part.outputs, part.inputs).items():
            name, place = part.stem + end, self._place(part.stem + end)
            if place is None:
                raise FailedPrecondition(
                    f"model: the weights in {self._folder} lack {name}, which {self.layout.sentence} has"
                )
            shape = tuple(axis.steps(part.outputs, part.inputs) for axis in piece.axes)
            if place.tensor.kind not in piece.kinds or place.shape != shape:
                has = f"{name} is {list(place.shape)} in {place.tensor.kind}"
                wanted = f"{list(shape)} in {' or '.join(piece.kinds)}"
                raise broken(place.file, f"{has}; {self.layout.sentence} of config.json makes {wanted}")
            found[end] = piece, place
        return found

    def groups(self, part: Part) -> Array:
        """Returns the group of each of the part's inputs. Raises FailedPrecondition for one that is not there."""
        group = self.layout.group or part.inputs
        inputs = part.at_inputs
        place = None if self.layout.index is None else self._place(part.stem + self.layout.index)
        if place is None:
            return inputs // group
        name = f"{part.stem}{self.layout.index}"
        if place.tensor.kind != "I32" or place.shape != (part.inputs,):
            has = f"{name} is {list(place.shape)} in {place.tensor.kind}"
            raise broken(place.file, f"{has}; a group for each of {part.inputs} inputs is in I32")
        found = _read(place, name, Piece(("I32",), (Axis(IN),)), part)
        index, count = found.raw.view("<i4")[..., 0], -(-part.inputs // group)
        if len(wrong := index[(index < 0) | (index >= count)]):
            raise broken(place.file, f"{name} has the group {wrong[0]}; there are {count}")
        return index.astype(np.int64)

    def check(self, parts: Collection[Part]) -> None:
        """Raises FailedPrecondition for a tensor that is missing or wrong. Of values it reads indexes alone."""
        are_coded = [self.has(part) for part in parts]
        for number, (part, is_coded) in enumerate(zip(parts, are_coded, strict=True)):
            if is_coded or not (number or any(are_coded)):
                self.find(part)
                self.groups(part)
            else:
                self._check_numbers(part)

    def check_others(self, names: Collection[str]) -> None:
        """Raises FailedPrecondition where a tensor that is no matrix of a layer, such as a head, is in codes."""
        end = next(iter(self.layout.pieces(1, 1)))
        for name in names:
            for one in (name, name.removesuffix(".weight") + end):
                place = self._place(one)
                if place is not None and place.tensor.kind not in NUMBERS:
                    has = f"{one} is in {place.tensor.kind}"
                    raise broken(place.file, f"{has}; matrices of layers alone may be in codes")

    def _check_numbers(self, part: Part) -> None:
        """Checks a matrix that the other tool has left in numbers."""
        name, shape = f"{part.stem}.weight", (part.outputs, part.inputs)
        place = self._place(name)
        if place is None:
            raise FailedPrecondition(f"model: the weights in {self._folder} lack {name}, in codes or in numbers")
        wanted = shape[::-1] if part.is_transposed else shape
        if place.tensor.kind not in NUMBERS or place.tensor.shape != wanted:
            has = f"{name} is {list(place.tensor.shape)} in {place.tensor.kind}"
            raise broken(place.file, f"{has}; config.json makes {list(wanted)} in {' or '.join(NUMBERS)}")

    def read(self, part: Part) -> tuple[Codes, Array, int]:
        """A part of a matrix, the group of each input, and how many bytes were read."""
        found = {end: _read(place, part.stem + end, piece, part) for end, (piece, place) in self.find(part).items()}
        return self.layout.unpack(found), self.groups(part), sum(one.raw.size for one in found.values())

    def bytes_of(self, part: Part) -> int:
        """Bytes of a part in the files."""
        n, k = (sum(map(len, ranges)) for ranges in (part.outs, part.ins))
        whole = max(part.outputs * part.inputs, 1)
        return sum(place.tensor.size for _, place in self.find(part).values()) * n * k // whole

    def step(self, parts: Collection[Part]) -> int | None:
        """The number of inputs that share scales in the kernels, for all parts; None: some must become numbers."""
        if self.layout.kept is None or not all(map(self.has, parts)):
            return None
        kinds = {self.find(part)[self.layout.scales][1].tensor.kind for part in parts}
        if self.layout.kept == "fours" and "F32" in kinds:
            return None
        return _step(self.layout, map(self.groups, parts))


def step_of(layout: Layout, parts: Collection[Part]) -> int | None:
    """`CodedFiles.step` by the configuration alone, for files that are not there: all is as it says, and in order."""
    return _step(layout, (part.at_inputs // (layout.group or part.inputs) for part in parts))


def _step(layout: Layout, groups: Iterable[Array]) -> int | None:
    steps = {"fours": STEPS, "eights": STEPS[:1], None: ()}[layout.kept]
    for group in groups:
        steps = [step for step in steps if _is_constant(group, step)]
    return next(iter(steps), None)


def _is_constant(group: Array, step: int) -> bool:
    """Whether inputs 0 to step - 1 are in one group, the next ones also in one, and so on."""
    at = np.arange(len(group)) // step * step
    return bool((group == group[at]).all())


def parts_of(recording: Recording) -> dict[str, Part]:
    """By the names of the recording's slices. Raises FailedPrecondition for one of more than MAX_INPUTS inputs."""
    parts = {name: part_of(recording.slices[name], name in recording.transposed) for name in recording.matrices}
    for part in parts.values():
        if part.inputs > MAX_INPUTS:
            raise FailedPrecondition(
                f"model: {part.stem} has {part.inputs} inputs; of codes at most {MAX_INPUTS} are read"
            )
    return parts


def _read(place: Place, name: str, piece: Piece, part: Part) -> Read:
    """The steps of a tensor that have the part."""
    cuts = [_cut(axis, length, part) for axis, length in zip(piece.axes, place.shape, strict=True)]
    steps = [sum(map(len, ranges)) for ranges, _ in cuts]
    axis = next((n for n, count in enumerate(steps) if count != place.shape[n]), 0)
    assert all(count == place.shape[n] for n, count in enumerate(steps) if n != axis), name
    item = BITS[place.tensor.kind] // 8
    raw = np.empty((*steps, item), np.uint8)
    runs = ((first * item, count * item) for first, count in Slice(name, place.shape, axis, cuts[axis][0]).runs())
    read_runs(place.file, name, runs, place.tensor.start, raw.reshape(-1).data)
    return Read(place.tensor.kind, raw, tuple(at for _, at in cuts))


def _cut(axis: Axis, length: int, part: Part) -> tuple[tuple[range, ...], Array]:
    """The steps of an axis that have the part, and where its outputs or inputs lie among those of these steps."""
    if axis.of == ALL:
        return (range(length),), np.arange(length)
    assert axis.of in (OUT, IN)
    steps, at, begin = list[range](), list[Array](), 0
    for one in part.outs if axis.of == OUT else part.ins:
        step = range(one.start // axis.per, -(-one.stop // axis.per))
        at.append(np.arange(one.start, one.stop) + (begin - step.start * axis.per))
        begin += len(step) * axis.per
        steps.append(step)
    return tuple(steps), np.concatenate(at)
