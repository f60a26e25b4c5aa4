"""Generates the Python of `protos/orca/v1/*.proto` beside them: messages, their types (.pyi) and gRPC services.

python protos/generate.py [--out FOLDER]
"""

import argparse
import re
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent


def generate(out: Path) -> None:
    """Writes the generated modules under `out` (as `out/orca/v1/..`). Raises SystemExit when protoc refuses."""
    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("orca/v1/*.proto"))
    well_known = files("grpc_tools") / "_proto"
    arguments = [
        "protoc",
        f"-I{ROOT}",
        f"-I{well_known}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
    ]
    if protoc.main([*arguments, *sources]) != 0:
        raise SystemExit("protoc failed")
    for module in out.glob("orca/v1/*_pb2_grpc.py"):
        if not re.search(r"class \w+Servicer", module.read_text()):
            module.unlink()  # the file has messages only


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT)
    generate(parser.parse_args().out)
