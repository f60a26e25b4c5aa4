"""The command `orca`: where only a part of its packages is installed, it says which extra brings the rest."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from orca_cli import stdout
from orca_cli.settings import quiet_grpc

if TYPE_CHECKING:
    from orca_worker.processes.beginning import Begun

EXTRAS = {"generate": "cli", "bench": "bench", "lab": "lab"}  # of commands; all others come with the extra `serve`


def begin_forks(arguments: Sequence[str]) -> Begun | None:
    """Begins the fork server of a command's stack, which imports for longer than all else of a start takes. None where
    the command has no stack, shows its help, or will say what is not installed."""
    if arguments[:1] not in (["serve"], ["demo"]) or {"--help", "-h"} & set(arguments) or not find_spec("uvloop"):
        return None
    from orca_worker.processes.beginning import POD, begin

    return begin(POD)


def main() -> None:
    quiet_grpc()
    gc.disable()  # modules stay, and looking for garbage among them takes a tenth of their import
    try:
        forks = begin_forks(sys.argv[1:])
        from orca_cli.main import app

        gc.freeze()
        gc.enable()

        stdout.run(partial(app, prog_name="orca", obj=forks))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except ModuleNotFoundError as missing:
        name = (missing.name or "").partition(".")[0]
        if not name or name.startswith("orca"):
            raise
        command = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
        extra = EXTRAS.get(command, "serve") if command else "cli"
        what = f"orca {command}" if command else "orca"
        sentence = f"{what}: {name} is not installed; pip install 'orca-serving[{extra}]' brings it"
        raise SystemExit(sentence) from None


if __name__ == "__main__":
    main()
