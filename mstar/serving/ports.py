"""Ports the server will listen on: chosen, checked to be free, and written as addresses."""

from __future__ import annotations

import errno
import socket

from mstar.utils.errors import LoadError


def family_of(address: str) -> socket.AddressFamily:
    """IPv6 for an address with a colon, else IPv4."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def choose_port(name: str, address: str, port: int) -> int:
    """``port`` if nothing listens there, or a free one for 0.

    The check is ours because the server lets two processes share a port on some systems.
    ``name`` is the option's name, for the message.

    Raises:
        LoadError: the port is out of range, in use, or the address is not one of this machine's.
    """
    if not 0 <= port <= 65535:
        raise LoadError(f"{name}: 0 to 65535, got {port}")
    with socket.socket(family_of(address), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free for a server
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise LoadError(f"{name}: port {port} is in use; stop what listens there or pass another") from None
            raise LoadError(f"{name}: cannot listen on {address} port {port}: {error.strerror}") from None
        return int(probe.getsockname()[1])


def choose_ports(address: str, http: int, grpc: int, metrics: int) -> tuple[int, int, int]:
    """Check or choose the server's three ports (HTTP, gRPC, metrics); no two are the same."""
    wanted = {"--http-port": http, "--grpc-port": grpc, "--metrics-port": metrics}
    taken: dict[int, str] = {}
    for name, port in wanted.items():
        if port and port in taken:
            raise LoadError(f"{name}: port {port} is also {taken[port]}")
        if port:
            taken[port] = name
    chosen: list[int] = []
    for name, port in wanted.items():
        got = choose_port(name, address, port)
        while port == 0 and (got in taken or got in chosen):
            got = choose_port(name, address, 0)
        chosen.append(got)
    return chosen[0], chosen[1], chosen[2]


def reachable_host(address: str) -> str:
    """The host a client on this machine connects to when the server listens on ``address``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)


def format_address(address: str, port: int) -> str:
    """``host:port`` for a client on this machine, IPv6 in brackets."""
    host = reachable_host(address)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
