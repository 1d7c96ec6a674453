"""Whether the public port can be bound, asked before anything depends on it."""

import errno
import socket

from triptych.services.runtime.lifecycle import StartupError


def check_port(host: str, port: int, flag: str = "--port") -> None:
    """Raises StartupError that says why a port cannot be bound; gRPC only says that it cannot.

    `flag`: the setting that the port comes from.
    """
    if port == 0:
        return
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        elsewhere = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        remedy = f"use another {flag.replace('port', 'host') if elsewhere else flag}"
        raise StartupError(f"port {port} on {host}: {error.strerror or error}; {remedy}") from error
