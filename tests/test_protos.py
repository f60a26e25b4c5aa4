"""The committed Python of the protos is what protos/generate.py makes of them."""

import subprocess
import sys
from pathlib import Path

PROTOS = Path(__file__).parents[1] / "protos"


def generated(folder: Path) -> dict[str, str]:
    """File name -> text of all generated modules and stubs."""
    return {path.name: path.read_text() for path in (folder / "orca/v1").glob("*_pb2*.py*")}


def test_generated_code_is_current(tmp_path: Path) -> None:
    subprocess.run([sys.executable, PROTOS / "generate.py", "--out", tmp_path], check=True)
    fresh, committed = generated(tmp_path), generated(PROTOS)
    assert set(fresh) == set(committed), "run `make protos`"
    stale = [name for name in fresh if fresh[name] != committed[name]]
    assert not stale, "run `make protos`"
