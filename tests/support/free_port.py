"""Ports of the loopback that nobody has just now, for programs that cannot take port 0."""

import socket


def free_ports(count: int) -> list[int]:
    """Different ones. Another process may take them before they are used."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()
