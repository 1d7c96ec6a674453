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


def break_connections(port: int, count: int = 3) -> None:
    """Listen on a port until so many connections have come, and close each at once."""
    with socket.socket() as nobody:
        nobody.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        nobody.bind(("127.0.0.1", port))
        nobody.listen()
        nobody.settimeout(60)
        for _ in range(count):
            nobody.accept()[0].close()
