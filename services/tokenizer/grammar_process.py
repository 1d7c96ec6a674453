"""The grammar checker's child process, as the thread that talks to it sees it."""

import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from dataclasses import dataclass

_MODULE = "triptych.services.tokenizer.grammar_checker_child"
_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 16
_START_SECONDS = 60.0  # imports, on a machine that is busy starting an engine
_OWN_TIMER = 2.0  # seconds: the child ends itself when nobody is left to end it


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """What one check may take."""

    seconds: float = 5.0
    memory_bytes: int = 512 << 20


class ChildGone(Exception):
    """The child is of no more use. `late`: it did not answer in time, else it died; `killed`: by
    somebody else."""

    def __init__(self, why: str, *, late: bool = False, killed: bool = False) -> None:
        super().__init__(why)
        self.late = late
        self.killed = killed


class GrammarProcess:
    """One child. After a ChildGone only `end` may be called."""

    def __init__(self, limits: CheckLimits) -> None:
        """Start it."""
        arguments = (str(limits.seconds + _OWN_TIMER), str(limits.memory_bytes))
        self._limits = limits
        self._ready = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a client's grammars must not write the log
            bufsize=0,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it has died."""
        return self._process.poll() is not None

    def wait_until_ready(self) -> None:
        """Until its imports are done, the first time. Raises ChildGone."""
        if not self._ready:
            self._receive(_START_SECONDS)
            self._ready = True

    def ask(self, message: bytes) -> dict[str, str]:
        """Its answer to a message. Raises ChildGone."""
        self._send(message)
        reply: dict[str, str] = json.loads(self._receive(self._limits.seconds))
        return reply

    def kill(self) -> None:
        """Ask for its end, from any thread: a call in progress raises ChildGone."""
        self._process.kill()

    def end(self) -> None:
        """End it and forget its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _send(self, message: bytes) -> None:
        pipe = self._process.stdin
        if pipe is None:
            raise AssertionError("it was opened with one")
        rest = memoryview(_LENGTH.pack(len(message)) + message)
        try:
            while rest:
                rest = rest[os.write(pipe.fileno(), rest) :]
        except BrokenPipeError as error:
            raise self._died() from error

    def _receive(self, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        (size,) = _LENGTH.unpack(self._exactly(_LENGTH.size, deadline))
        return self._exactly(size, deadline)

    def _exactly(self, size: int, deadline: float) -> bytes:
        pipe = self._process.stdout
        if pipe is None:
            raise AssertionError("it was opened with one")
        data = bytearray()
        while len(data) < size:
            left = deadline - time.monotonic()
            readable, _, _ = select.select((pipe,), (), (), max(left, 0.0))
            if not readable:
                raise ChildGone("it did not answer in time", late=True)
            chunk = os.read(pipe.fileno(), min(_CHUNK, size - len(data)))
            if not chunk:
                raise self._died()
            data += chunk
        return bytes(data)

    def _died(self) -> ChildGone:
        code = self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        killed = code in (-signal.SIGKILL, -signal.SIGTERM)
        return ChildGone(f"it died: {how}", late=code == -signal.SIGALRM, killed=killed)
