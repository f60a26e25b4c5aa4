"""The ends of commands: an error that a user can cause is a sentence."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def sentences(*others: type[Exception], interrupted: int = 130) -> Iterator[None]:
    """Ends the command with status 1 and a sentence for an OrcaError or one of `others`, and without one for Ctrl-C.

    interrupted: the status after Ctrl-C; 0 where a reader ends the command so.
    """
    from orca_common.errors import OrcaError  # where no service is installed, `orca generate` runs without

    try:
        yield
    except (OrcaError, *others) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(interrupted) from None
