"""`host:port`, with an IPv6 host in brackets."""


def join_address(host: str, port: int) -> str:
    """The address of a port on a host, which is a name or an IP address without brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """The host, without brackets, and the port. Raises ValueError when the port is no number."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
