"""Checks whether workers of a new revision could form, before anything of the old one is touched.

    python -m orca_worker.models.check FOLDER --tp 2 --pp 2 [--adapters NAME=FOLDER,..] [--config-only]

Exit codes: 0; 1 with a sentence on standard error; 2 for a wrong command line. The chart's hook before an upgrade runs
it in a pod that has a worker's image and sees a worker's model. It imports no torch. The only tensors that it reads are
those that say the groups of inputs, as GPTQ's files have them.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from orca_common.adapters import read_adapters
from orca_common.checkpoint import read_checkpoint, resolve_model
from orca_common.errors import FailedPrecondition

from .families import check_partition, check_type, check_weights, layout_sentence


def check(
    folder: Path, tensor_parallel: int, pipeline_parallel: int, *, adapters: str = "", config_only: bool
) -> str | None:
    """Raises FailedPrecondition with a rank's sentence when no tp x pp ranks could serve this checkpoint.

    adapters: as the setting says them. config_only: the folder has no weights, because only its config.json was
    fetched; nor are adapters looked for. Returns how another tool has quantized the weights, if one has.
    """
    found = read_adapters(adapters)
    checkpoint = read_checkpoint(folder, adapters=() if config_only else found)
    check_partition(checkpoint, tensor_parallel, pipeline_parallel)
    if not config_only:
        check_weights(checkpoint)
    return layout_sentence(checkpoint)


def main(words: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m orca_worker.models.check", description=__doc__)
    parser.add_argument("folder", help="of the checkpoint")
    parser.add_argument("--tp", type=int, required=True, help="tensor ranks")
    parser.add_argument("--pp", type=int, required=True, help="pipeline stages")
    parser.add_argument("--adapters", default="", help="that are served beside it, as NAME=FOLDER,NAME=FOLDER")
    parser.add_argument("--config-only", action="store_true", help="the folder has no weights")
    given = parser.parse_args(words)
    try:
        folder = resolve_model(given.folder, check_type)
        layout = check(folder, given.tp, given.pp, adapters=given.adapters, config_only=given.config_only)
    except FailedPrecondition as error:
        print(f"{error}; nothing was changed", file=sys.stderr)
        return 1
    weights = "" if layout is None else f"; its weights: {layout}"
    print(f"{given.folder} can be served by {given.tp} x {given.pp} ranks (tp x pp){weights}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
