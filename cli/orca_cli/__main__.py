"""The command `orca`: where only a part of its packages is installed, it says which extra brings the rest."""

import gc
import sys
from functools import partial

from orca_cli import stdout
from orca_cli.settings import quiet_grpc

EXTRAS = {"generate": "cli", "bench": "bench"}  # of commands; all others come with the extra `serve`


def main() -> None:
    quiet_grpc()
    gc.disable()  # modules stay, and looking for garbage among them takes a tenth of their import
    try:
        from orca_cli.main import app

        gc.freeze()
        gc.enable()

        stdout.run(partial(app, prog_name="orca"))
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
