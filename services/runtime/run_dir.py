"""The run directory: where the processes of one engine meet, and how two engines are kept apart."""

import fcntl
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from triptych.services.runtime.lifecycle import StartupError

_SOCKET_PATH_MAX = 107  # sizeof(sockaddr_un.sun_path) - 1


@dataclass(frozen=True, slots=True)
class RunDir:
    """Names of all sockets of one engine. The folder is private to its user (0700)."""

    path: Path

    @classmethod
    def open(cls, path: str | Path, *, create: bool = True) -> "RunDir":
        """Create the folder if need be; with `create` false, only ask what is in one that is there.

        Raises StartupError when it is not there or not a private folder.
        """
        folder = Path(path).absolute()
        longest = folder / "tokenizer-999.control.sock"
        if len(os.fsencode(longest)) > _SOCKET_PATH_MAX:
            raise StartupError(
                f"run directory {folder} is too long for unix sockets: "
                f"{len(os.fsencode(longest))} bytes, at most {_SOCKET_PATH_MAX}; use --run-dir"
            )
        try:
            if create:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = folder.stat()
        except FileNotFoundError as error:
            raise StartupError(
                f"run directory {folder} does not exist; start an engine with triptych serve, "
                "or use another --run-dir"
            ) from error
        except OSError as error:
            reason = f"{error.strerror}; use --run-dir"
            raise StartupError(f"run directory {folder}: {reason}") from error
        if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
            raise StartupError(
                f"run directory {folder} must belong to this user with mode 0700 "
                f"(it has uid {facts.st_uid}, mode {stat.S_IMODE(facts.st_mode):04o})"
            )
        return cls(folder)

    @property
    def scheduler_endpoint(self) -> str:
        """ZeroMQ: the scheduler binds a ROUTER here, tokenizers connect DEALERs."""
        return f"ipc://{self.path / 'scheduler.zmq'}"

    @property
    def executor_endpoint(self) -> str:
        """ZeroMQ: the scheduler binds a ROUTER here, executors connect DEALERs."""
        return f"ipc://{self.path / 'executor.zmq'}"

    @property
    def executor_fds(self) -> Path:
        """Unix SOCK_SEQPACKET socket bound by the scheduler; ring descriptors cross it."""
        return self.path / "executor.fds"

    def control_socket(self, name: str) -> Path:
        """Socket of a process's control endpoint; the gRPC target is `unix:` + this path."""
        return self.path / f"{name}.control.sock"

    def lock(self, name: str) -> int:
        """Hold the role `name` until the process ends; returns the descriptor to keep open.

        Raises StartupError when a live process holds it, or when its file cannot be opened. A lock
        needs no cleaning up after kill -9.
        """
        path = self.path / f"{name}.lock"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupError(f"{path}: {error.strerror}; use another --run-dir") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise StartupError(
                f"another {name} runs in {self.path} (pid {holder}); "
                "stop it or use another --run-dir"
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return fd

    def held(self, name: str) -> bool:
        """Whether a live process holds the role `name`."""
        try:
            fd = os.open(self.path / f"{name}.lock", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False
