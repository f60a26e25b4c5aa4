"""Generates the Python of `protos/orca/v1/*.proto` beside them: messages, their types (.pyi) and gRPC services.

python protos/generate.py [--out FOLDER]
python protos/generate.py --released      # at a release: released.binpb becomes what later contracts must not break
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


def release(out: Path) -> None:
    """Writes the public contract, with what it imports, as a google.protobuf.FileDescriptorSet."""
    well_known = files("grpc_tools") / "_proto"
    what = [f"--descriptor_set_out={out}", "--include_imports", "orca/v1/orca.proto"]
    if protoc.main(["protoc", f"-I{ROOT}", f"-I{well_known}", *what]) != 0:
        raise SystemExit("protoc failed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT)
    parser.add_argument("--released", action="store_true")
    arguments = parser.parse_args()
    if arguments.released:
        release(arguments.out / "released.binpb")
    else:
        generate(arguments.out)
