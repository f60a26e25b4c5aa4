"""Credentials for a server that speaks TLS."""

from pathlib import Path

import grpc


def tls_credentials(folder: str | Path) -> grpc.ChannelCredentials:
    """Credentials for OrcaClient from a folder: `ca.crt`, the authority that has signed the server's certificate; and
    for mTLS `tls.crt` and `tls.key`, a certificate of the role client. `orca certs` makes such a folder.

    Raises OSError for a file that cannot be read.
    """
    folder = Path(folder)
    certificate, key = folder / "tls.crt", folder / "tls.key"
    own = (key.read_bytes(), certificate.read_bytes()) if certificate.exists() else (None, None)
    return grpc.ssl_channel_credentials((folder / "ca.crt").read_bytes(), *own)
