"""Headers of safetensors files: believed where the format's own library believes them, refused by the tensor's name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_gpt2
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from worker.test_check import check

from orca_common.errors import FailedPrecondition
from orca_worker.models.header import BITS, header_of
from orca_worker.models.weight_files import fingerprint
from orca_worker.models.weights import read_header

NAME = "model.safetensors"
TABLE = "transformer.wte.weight"

Header = dict[str, Any]


def pack(header: Header, size: int) -> bytes:
    """A file with this header and `size` bytes of tensors."""
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(size)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    return make_gpt2(folder, heads=2, layers=2, hidden=16, vocab=97, positions=32, seed=1)


@pytest.fixture(scope="module")
def stored(model: Path) -> tuple[Header, bytes]:
    raw = (model / NAME).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def negative(header: Header) -> None:
    header[TABLE]["shape"] = [-97, -16]


def huge(header: Header) -> None:
    header[TABLE]["shape"] = [1 << 40, 16]


def overlapping(header: Header) -> None:
    """Each of the two has the right size."""
    same = [name for name, info in header.items() if info.get("shape") == [16]]
    header[same[1]]["data_offsets"] = header[same[0]]["data_offsets"]


def unknown(header: Header) -> None:
    header[TABLE]["dtype"] = "F31"


def backwards(header: Header) -> None:
    header[TABLE]["data_offsets"].reverse()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (negative, f"'{TABLE}' needs a type, a shape and two offsets, all whole numbers from 0 on"),
        (huge, f"'{TABLE}' of shape [{1 << 40}, 16] and type F32 lies at bytes "),
        (overlapping, "overlaps the tensor before it"),
        (unknown, f"'{TABLE}' has the type 'F31', which safetensors does not have"),
        (backwards, f"'{TABLE}' of shape [97, 16] and type F32 lies at bytes "),
    ],
)
def test_every_reader_refuses_it_by_name(
    model: Path, stored: tuple[Header, bytes], tmp_path: Path, change: Callable[[Header], None], words: str
) -> None:
    """Also the check before an upgrade, which said that it can be served."""
    folder = shutil.copytree(model, tmp_path / "model")
    header = json.loads(json.dumps(stored[0]))
    change(header)
    raw = json.dumps(header).encode()
    (folder / NAME).write_bytes(len(raw).to_bytes(8, "little") + raw + stored[1])
    with pytest.raises(FailedPrecondition) as refused:
        read_header(folder / NAME)
    assert words in str(refused.value)
    code, said = check(folder, "--tp=1", "--pp=1")
    assert (code, words in said) == (1, True), said
    assert len(fingerprint(folder)) == 16


INFO = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*BITS, "F32", "F32", "f32", ""]),
        "shape": st.lists(st.sampled_from([0, 1, 2, 3, 4, -1, 1 << 40, 1 << 61]), max_size=3),
        "gap": st.sampled_from([0, 0, 0, 0, 0, -4, 4]),
        "more": st.sampled_from([0, 0, 0, 0, 0, 1]),
    }
)


@given(st.lists(INFO, max_size=4), st.sampled_from([0, 0, 0, -1, 1]), st.booleans())
@example([{"dtype": "F4", "shape": [1 << 40, 1 << 40, 0], "gap": 0, "more": 0}], 0, False)
@example([{"dtype": "F4", "shape": [0, 1 << 40, 1 << 40], "gap": 0, "more": 0}], 0, False)
def test_it_believes_what_the_formats_library_believes(
    tmp_path_factory: pytest.TempPathFactory, infos: list[dict[str, Any]], behind: int, metadata: bool
) -> None:
    """Types, shapes, holes, overlaps, and bytes that are too few or too many."""
    header: Header = {"__metadata__": {"format": "pt"}} if metadata else {}
    free = 0
    for n, info in enumerate(infos):
        size = abs(BITS.get(info["dtype"], 8))
        for length in info["shape"]:
            size *= length
        begin = max(free + info["gap"], 0)
        end = max(min(begin + size // 8 + info["more"], 1 << 62), 0)
        header[f"t{n}"] = {"dtype": info["dtype"], "shape": info["shape"], "data_offsets": [begin, end]}
        free = end
    raw = pack(header, max(min(free, 4096) + behind, 0))
    file = tmp_path_factory.getbasetemp() / "any.safetensors"
    file.write_bytes(raw)
    try:
        theirs = {name: tuple(one["shape"]) for name, one in deserialize(raw)}
    except SafetensorError:
        theirs = None
    try:
        ours = {name: one.shape for name, one in header_of(file).tensors.items()}
    except FailedPrecondition:
        ours = None
    assert ours == theirs
