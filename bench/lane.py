"""The benchmark's side of a lane: one engine in a process of its own, asked over a pipe.

Lanes take turns on the same cores. A lane that is not asked is stopped (SIGSTOP): threads that spin
while they wait for work, as OpenMP's do when they are told to, would otherwise take the cores of
the lane that is measured.
"""

import json
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

STOP_SECONDS = 10.0
LANES = Path(__file__).parent / "lanes"


class LaneError(RuntimeError):
    """The lane's process ended; the message has the last lines that it wrote."""


class Lane:
    """A process that answers operations (lanes/protocol.py); use it as a context."""

    def __init__(
        self,
        python: Path,
        script: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment` is added to this process's own. The lane runs until its first answer."""
        settings = [f"{name}={value}" for name, value in (environment or {}).items()]
        self._name = script
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in close()
        self._process = subprocess.Popen(
            ["env", *settings, str(python), str(LANES / script), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        self._stopped = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The lane's process."""
        return self._process.pid

    def ask(self, op: str, **arguments: object) -> Any:
        """Run one operation with the lane awake, and put it to sleep again."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        if self._stopped:
            self._process.send_signal(signal.SIGCONT)
        try:
            stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait(STOP_SECONDS)
            self._log.seek(0)
            tail = "".join(self._log.readlines()[-20:])
            raise LaneError(f"{self._name}: {op} ended the lane with code {code}\n{tail}")
        self._process.send_signal(signal.SIGSTOP)
        self._stopped = True
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait(STOP_SECONDS)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._log.close()
