"""`orca certs` and `orca key`: certificates for services, and keys for callers."""

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from orca_cli.sentences import sentences


def certs(
    folder: Annotated[Path, typer.Argument(help="Folder of the authority, and of a folder for each role.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name or IP address of the services, beside this machine's own. May be repeated."),
    ] = None,
    days: Annotated[float, typer.Option(min=0.001, help="Days for which the certificates are valid.")] = 90,
) -> None:
    """Makes a development CA, and a certificate for each role: endpoint, scheduler, worker, client and redis.

    A folder that has a CA keeps it, and gets new certificates: running services take them up without a restart.
    """
    from orca_local.authority import HERE, HOLDERS, Authority

    try:
        with sentences():
            kept = (folder / "ca.key").exists()
            authority = Authority(folder)
            for holder in HOLDERS:
                typer.echo(authority.issue(holder, [*HERE, *(host or ())], timedelta(days=days)))
    except OSError as error:
        typer.echo(f"folder: {error.filename or folder} cannot be written ({error.strerror})", err=True)
        raise typer.Exit(1) from None
    if kept:
        typer.echo("the authority is the one that was there; all certificates and keys are new", err=True)
    typer.echo(f"for development: whoever has {folder / 'ca.key'} can be anybody", err=True)


def key(tenant: Annotated[str, typer.Argument(help="Name of the tenant that will call with the key.")]) -> None:
    """Makes an API key: prints the key, which is kept nowhere, and its line for the endpoint's api_keys_file."""
    from orca_common.api_keys import line_of, new_key

    made = new_key()
    with sentences():
        line = line_of(tenant, made)
    typer.echo(f"key:  {made}")
    typer.echo(f"line: {line}")
