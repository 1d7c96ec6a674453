"""What a benchmark that starts services owes the machine: ports of its own, and no child left."""

import signal
import socket
import sys


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def exit_on_sigterm() -> None:
    """SIGTERM then ends this process as an exception does: contexts end what they have started."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
