"""A process that has imported what the others need, and waits to be forked.

A process that ended is missed until another one is there, and most of a start is imports. The
supervisor cannot fork once it serves gRPC: it has threads then. So it keeps a process that has not,
and asks it for children. They are children of the supervisor all the same: their first parent
leaves at once, and the supervisor, which makes itself the reaper of its descendants meanwhile,
inherits them. Where there is no fork server (it was killed, or is being started) a process is
started as a program, which only takes longer.

The code that children run is that of the fork server's start. `replace` starts one anew.
"""

import contextlib
import ctypes
import importlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial

from triptych.services.cli.child import ChildSpec, Forked, Process
from triptych.services.cli.common_imports import import_what_all_need, import_what_steps_need
from triptych.services.cli.fork import fork_child, set_name, single_threaded
from triptych.services.runtime.lifecycle import EXIT_FAILED, EXIT_OK, bind_to_parent, run_main

_PR_SET_CHILD_SUBREAPER = 36
_ANSWER_SECONDS = 2.0
_ADOPTION_SECONDS = 5.0
_MOST_BYTES = 1 << 17
_NAME = "fork-server"
_READY = b"ready"
_BEGIN = b"b"

_log = logging.getLogger(__name__)


class ForkServer:
    """The supervisor's end. Main thread only: children are bound to the thread that inherits them.

    Nothing here is fatal: what cannot be forked is started otherwise.
    """

    def __init__(self) -> None:
        """There is none yet."""
        self._socket: socket.socket | None = None
        self._process: Process | None = None
        self._ready = False

    @property
    def pid(self) -> int:
        """Of the server; 0: there is none."""
        return 0 if self._process is None else self._process.pid

    @property
    def ready(self) -> bool:
        """Whether it can be asked for children."""
        try:
            return self._socket is not None and self._answers_ready(self._socket)
        except (OSError, ValueError):
            return False

    def fork_here(self, close: Sequence[int] = ()) -> None:
        """Fork one from this process, which has imported all and has one thread; `close` as for
        fork_child. Nothing in a process with threads."""
        if not single_threaded():
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        body = partial(_serve, theirs, os.getpid())
        self._process = Forked(fork_child(_NAME, body, close=(*close, ours.fileno())))
        theirs.close()
        self._socket = ours

    def replace(self) -> None:
        """Start one as a program, with the code that is there now, in the place of this one."""
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._socket = ours

    def fork(self, spec: ChildSpec) -> int | None:
        """A new child of this process that does what the spec's command does: its pid. None when
        there is no fork server that can, or that answers soon."""
        if self._socket is None:
            return None
        try:
            if not self._answers_ready(self._socket):
                return None
            _adopt_orphans(True)
            self._socket.settimeout(_ANSWER_SECONDS)
            return _asked(self._socket, spec)
        except (OSError, ValueError) as error:
            _log.warning("no fork server: %s; starting another", error)
            self.replace()
            return None
        finally:
            _adopt_orphans(False)

    def close(self) -> None:
        """End it."""
        process, self._process = self._process, None
        server, self._socket = self._socket, None
        self._ready = False
        if process is not None:
            os.kill(process.pid, signal.SIGKILL)  # not reaped before: the number is still its own
            process.wait()
        if server is not None:
            server.close()

    def _answers_ready(self, server: socket.socket) -> bool:
        """Whether it has imported all. Raises ValueError when it ended."""
        if not self._ready and select.select([server], [], [], 0)[0]:
            if server.recv(len(_READY)) != _READY:
                raise ValueError("it ended")
            self._ready = True
        return self._ready


def _asked(server: socket.socket, spec: ChildSpec) -> int:
    """The pid of a new child. It begins once it is told to, when its pid is known here: one that
    nobody knows would hold the role of another for ever."""
    waits, tells = os.pipe()
    try:
        socket.send_fds(server, [json.dumps([spec.name, *spec.command]).encode()], [waits])
        pid = _pid_in(server.recv(32))
        os.write(tells, _BEGIN)
    finally:
        os.close(waits)
        os.close(tells)
    return pid


def _pid_in(answer: bytes) -> int:
    if not answer:
        raise ValueError("it ended")
    return int(answer)


def _adopt_orphans(wanted: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


# ---------------------------------------------------------------------- the server


def _serve(requests: socket.socket, supervisor: int) -> int:
    """Fork a child for each request, until there is nobody to ask."""
    bind_to_parent(supervisor)
    with contextlib.suppress(ConnectionError):  # it goes, and does not say so
        requests.send(_READY)
        while True:
            request, fds, *_ = socket.recv_fds(requests, _MOST_BYTES, 1)
            if not request:
                break
            name, *command = json.loads(request)
            pid = _fork_for(supervisor, name, command, fds[0], requests.fileno())
            os.close(fds[0])
            requests.send(str(pid).encode())
    return EXIT_OK


def _fork_for(supervisor: int, name: str, command: Sequence[str], told: int, requests: int) -> int:
    """Fork a child and leave it to the supervisor, which tells it through `told` to begin."""
    readable, writable = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            body = partial(_live, supervisor, os.getpid(), command, told)
            pid = fork_child(name, body, close=(requests, readable, writable))
            os.write(writable, str(pid).encode())
        finally:
            os._exit(EXIT_OK)
    os.close(writable)
    with open(readable) as answer:  # noqa: PTH123  # a descriptor
        pid = int(answer.read())
    os.waitpid(between, 0)
    return pid


def _live(supervisor: int, between: int, command: Sequence[str], told: int) -> int:
    """The whole life of a child: what `python -m MODULE ...` does."""
    deadline = time.monotonic() + _ADOPTION_SECONDS
    while os.getppid() == between and time.monotonic() < deadline:
        time.sleep(0.0005)
    if os.getppid() != supervisor:
        return EXIT_FAILED  # nobody waits for it any more
    if os.read(told, len(_BEGIN)) != _BEGIN:
        return EXIT_FAILED  # nobody knows of it
    os.close(told)
    module = importlib.import_module(f"{command[2]}.__main__")
    return int(module.main(list(command[3:])))


def _main(argv: Sequence[str]) -> int:
    """Of the program: argv is the socket's descriptor and the supervisor's pid."""
    requests, supervisor = int(argv[0]), int(argv[1])
    set_name(_NAME)
    import_what_all_need()
    import_what_steps_need()
    return _serve(socket.socket(fileno=requests), supervisor)


if __name__ == "__main__":
    sys.exit(run_main(_NAME, lambda: _main(sys.argv[1:])))
