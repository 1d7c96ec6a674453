"""Rings between two real processes: what one writes the other reads, and a death leaves nothing."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from triptych.engine_core.layout import LogitsLayout
from triptych.services.transport import fd_passing
from triptych.services.transport.fd_passing import FdConnection, FdListener, Offer
from triptych.services.transport.rings import LogitsRing, RingError

LAYOUT = LogitsLayout(num_slots=2, max_logits=4, vocabulary_size=1009)
EPOCH = 41
_SEALED, _UNSEALED = "sealed", "unsealed"


def write_steps(path: Path, kind: str) -> None:
    """The other process: offer a ring, then write the step that each line of stdin names."""
    ring = LogitsRing.create(LAYOUT, EPOCH)
    fd = ring.fd
    if kind == _UNSEALED:
        fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, LAYOUT.total_bytes)
        os.pwrite(fd, LAYOUT.header(EPOCH), 0)
    connection = fd_passing.connect(path, timeout=10.0)
    connection.send(Offer(EPOCH, b"writer", fd))
    for line in sys.stdin:
        step_id = int(line)
        slot, rows = step_id % 2, 1 + step_id % 4
        ring.logits(slot)[:rows] = step_id + np.arange(rows, dtype=np.float32)[:, None]
        ring.publish(slot, step_id, rows)
        sys.stdout.write(f"{step_id}\n")
        sys.stdout.flush()


class Writer:
    """The other process and our end of the connection to it."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.listener = FdListener(folder / "fds")
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(folder / "fds"), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.connection = self._accept()
        self.connection._socket.settimeout(20.0)
        offer = self.connection.receive()
        assert offer is not None
        self.offer = offer

    def _accept(self) -> FdConnection:
        self.listener._socket.settimeout(20.0)
        connection = self.listener.accept()
        assert connection is not None
        return connection

    def write(self, step_id: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{step_id}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == f"{step_id}\n"

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.connection.close()
        self.listener.close()


@pytest.fixture
def writer(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Writer]:
    writer = Writer(tmp_path, getattr(request, "param", _SEALED))
    yield writer
    writer.close()


def test_steps_of_another_process(writer: Writer) -> None:
    ring = LogitsRing.attach(writer.offer.fd, LAYOUT, writer.offer.epoch)
    for step_id in range(1, 300):
        writer.write(step_id)
        rows = 1 + step_id % 4
        logits = ring.rows(step_id % 2, step_id, rows)
        assert (logits == step_id + np.arange(rows)[:, None]).all()
        with pytest.raises(RingError):
            ring.rows((step_id + 1) % 2, step_id, rows)
    del logits
    assert ring.close()


def test_a_killed_writer(writer: Writer) -> None:
    """What it wrote can be read to the end; end of file says that it is gone; nothing stays."""
    ring = LogitsRing.attach(writer.offer.fd, LAYOUT, EPOCH)
    writer.write(7)
    writer.process.send_signal(signal.SIGKILL)
    assert writer.connection.receive() is None
    assert writer.process.wait(10) == -signal.SIGKILL
    assert (ring.rows(1, 7, 4) == 7 + np.arange(4)[:, None]).all()
    with pytest.raises(RingError, match="holds step 7"):
        ring.rows(1, 9, 2)
    assert ring.close()
    assert "triptych-logits" not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("writer", [_UNSEALED], indirect=True)
def test_an_unsealed_ring_is_refused(writer: Writer) -> None:
    with pytest.raises(RingError, match="seals"):
        LogitsRing.attach(writer.offer.fd, LAYOUT, EPOCH)


def test_a_ring_of_another_epoch_is_refused(writer: Writer) -> None:
    with pytest.raises(RingError, match="epoch is 0x29, expected 0x2a"):
        LogitsRing.attach(writer.offer.fd, LAYOUT, EPOCH + 1)


if __name__ == "__main__":
    write_steps(Path(sys.argv[1]), sys.argv[2])
