"""How a process starts and ends: start-up errors, signals, exit codes, the bond to its parent."""

import asyncio
import ctypes
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_STARTUP = 2
EXIT_HUNG = 70
"""Of a process that found itself hung: a step took longer than step_timeout."""
EXIT_GROUP = 71
"""Of an executor that ended only because another rank of its group had: it is not to blame."""

_PR_SET_PDEATHSIG = 1
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StartupError(Exception):
    """Something the operator must mend: one clear line on stderr, exit code 2, no traceback."""


def run_main(process: str, body: Callable[[], int | None]) -> int:
    """Run a process's body and turn how it ended into an exit code.

    0 (or what the body returns) for a clean end; 2 and one line for a StartupError; 130 for an
    interrupt that nobody took; 1 and a traceback for anything else, which is our bug.
    """
    repair_standard_streams()
    try:
        return body() or EXIT_OK
    except StartupError as error:
        print_error(process, str(error))
        return EXIT_STARTUP
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception:  # the top of the process
        traceback.print_exc()
        return EXIT_FAILED
    finally:
        gc.enable()  # where the start did not come to its end


def repair_standard_streams() -> None:
    """Put something in the place of standard streams that are closed (`>&-`).

    Otherwise the next file or socket that is opened becomes standard output. Input is empty, errors
    go nowhere, and writing to the output fails as it does for other programs.
    """
    for fd, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, mode)  # the lowest free number, so this one
            os.set_inheritable(opened, True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115  # a descriptor
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115  # as above
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115  # as above


def print_error(process: str, message: str) -> None:
    """Write the one line by which a process says why it does not run."""
    line = " ".join(message.split())
    speaker = f"triptych {process}".rstrip()
    sys.stderr.write(f"{speaker}: error: {line}\n")
    sys.stderr.flush()


def bind_to_parent(parent_pid: int | None) -> None:
    """Make the kernel SIGKILL this process when the process that started it ends; None: do nothing.

    Call it on the main thread, early. The bond is to the thread that forked us, so a parent starts
    its children from its main thread. It does not pass to our own children: each child binds itself
    to its own parent, and a whole tree goes when its root is killed.

    Raises StartupError when `parent_pid` is no longer our parent: it ended before we were bound.
    """
    if parent_pid is None:
        return
    if threading.current_thread() is not threading.main_thread():
        raise AssertionError("bind_to_parent must run on the main thread")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise StartupError(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:
        raise StartupError(f"parent process {parent_pid} has ended (the parent is {os.getppid()})")


def begin_start() -> None:
    """Collect no garbage until `end_start`: imports and loading make objects that stay."""
    gc.disable()


def end_start() -> None:
    """Collect garbage from now on, but never look again at what the start has left."""
    gc.freeze()
    gc.enable()


def on_stop_signal(callback: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
    """Call `callback` on the loop, once, at the first SIGTERM or SIGINT; a second one ends the
    process at once. Call it on the main thread.
    """
    seen = False

    def stop(number: int) -> None:
        nonlocal seen
        if seen:
            os._exit(128 + number)
        seen = True
        callback()

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, stop, int(number))
