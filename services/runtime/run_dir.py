"""The run directory: where the processes of one engine meet, and how two engines are kept apart."""

import fcntl
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from triptych.services.runtime.lifecycle import StartupError

_SOCKET_PATH_MAX = 107  # sizeof(sockaddr_un.sun_path) - 1
_LOCK_TRIES = 5
_LOCK_SECONDS = 0.01


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

    @property
    def samplers(self) -> Path:
        """Unix SOCK_SEQPACKET socket bound by the scheduler; programs that draw tokens themselves
        connect."""
        return self.path / "samplers.sock"

    @property
    def executor_group(self) -> Path:
        """Unix SOCK_SEQPACKET socket bound by rank 0 of several executors, until all are there."""
        return self.path / "executor-group.sock"

    def control_socket(self, name: str) -> Path:
        """Socket of a process's control endpoint; the gRPC target is `unix:` + this path."""
        return self.path / f"{name}.control.sock"

    def lock(self, name: str) -> int:
        """Hold the role `name` until the process ends; returns the descriptor to keep open.

        Raises StartupError when a live process holds it, or when its file cannot be opened. A lock
        needs no cleaning up after kill -9.
        """
        fd = self.claim(name)
        if fd is None:
            raise StartupError(
                f"another {name} runs in {self.path} (pid {self._holder(name)}); "
                "stop it or use another --run-dir"
            )
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return fd

    def claim(self, name: str) -> int | None:
        """Hold the role `name`, without a word of who does, while the descriptor is open; None when
        a live process holds it. Raises StartupError when its file cannot be opened."""
        path = self.path / f"{name}.lock"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupError(f"{path}: {error.strerror}; use another --run-dir") from error
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_LOCK_SECONDS)  # somebody may only be asking (`held`)
            else:
                return fd
        os.close(fd)
        return None

    def removed(self, name: str) -> bool:
        """Whether the file of a role that is held is gone: somebody has removed the folder, and its
        processes do not find one another any more."""
        try:
            (self.path / f"{name}.lock").stat()
        except FileNotFoundError:
            return True
        except OSError:
            return False  # nobody can say
        return False

    def _holder(self, name: str) -> str:
        try:
            return (self.path / f"{name}.lock").read_text().strip() or "unknown"
        except (OSError, UnicodeDecodeError):
            return "unknown"

    def lock_first_free(self, kind: str) -> str:
        """`lock` the first of kind-0, kind-1, ... that no live process holds; returns its name.

        Raises StartupError where none of a thousand is free, or a file cannot be opened.
        """
        for name in (f"{kind}-{number}" for number in range(1000)):
            if self.held(name):
                continue
            try:
                self.lock(name)
            except StartupError:
                if not self.held(name):
                    raise
                continue  # somebody else was quicker
            return name
        raise StartupError(f"a thousand processes {kind}-N run in {self.path}")

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
