"""The engine's end of samplers.sock, scripted by a test: real sockets, real sealed memory."""

import fcntl
import mmap
import os
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from triptych.client.sampler import Draw, ExternalSampler, LogitsRow
from triptych.engine_core.layout import LOGITS_HEADER, LogitsLayout
from triptych.v1 import sampler_pb2

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
SECONDS = 30.0
"""For anything that must come."""
EPOCH = 2**63 + 5
VOCABULARY, SAMPLEABLE = 19, 16
TOKEN_TIMEOUT_MS = 10_000


def memory_file(header: bytes, size: int, seals: int = SEALS) -> int:
    fd = os.memfd_create("triptych-logits", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    os.pwrite(fd, header, 0)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def offer_of(layout: LogitsLayout) -> sampler_pb2.SamplerReply:
    offer = sampler_pb2.LeaseOffer(
        num_rows=layout.num_slots,
        vocabulary_size=layout.vocabulary_size,
        sampleable_vocabulary=min(SAMPLEABLE, layout.vocabulary_size),
        token_timeout_ms=TOKEN_TIMEOUT_MS,
        epoch=EPOCH,
    )
    return sampler_pb2.SamplerReply(offer=offer)


@dataclass
class Rows:
    """The memory of a lease, written here."""

    layout: LogitsLayout
    mapping: mmap.mmap

    def publish(self, row: int, ticket: int, logits: Sequence[float]) -> None:
        """Write a row of `vocabulary_size` logits, then its ticket."""
        start = self.layout.slot_offset(row)
        assert len(logits) == self.layout.vocabulary_size
        struct.pack_into(
            f"<{len(logits)}f", self.mapping, start + self.layout.logits_offset, *logits
        )
        LOGITS_HEADER.pack_into(self.mapping, start, ticket, 1, 0)


class Peer:
    """A sampler that has connected."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.settimeout(SECONDS)
        self._rows: Rows | None = None

    @property
    def rows(self) -> Rows:
        assert self._rows is not None
        return self._rows

    def lease(self) -> sampler_pb2.LeaseRequest:
        """What it begins with."""
        message = self._receive()
        assert message is not None
        assert message.WhichOneof("message") == "lease"
        return message.lease

    def drawn(self) -> list[tuple[int, int, int]]:
        """(row, ticket, token id) of each token of the next packet."""
        message = self._receive()
        assert message is not None, "the sampler ended the connection"
        assert message.WhichOneof("message") == "drawn"
        return [(each.row, each.ticket, each.token_id) for each in message.drawn.tokens]

    def wait_gone(self) -> None:
        """Until the sampler has ended the connection, without another word."""
        assert self._receive() is None

    def grant(self, vocabulary: int = VOCABULARY) -> sampler_pb2.LeaseRequest:
        """Take its request and offer what it asks for."""
        lease = self.lease()
        layout = LogitsLayout(num_slots=lease.num_rows, max_logits=1, vocabulary_size=vocabulary)
        fd = memory_file(layout.header(EPOCH), layout.total_bytes)
        self._rows = Rows(layout, mmap.mmap(fd, layout.total_bytes))
        self.send(offer_of(layout).SerializeToString(), fd)
        return lease

    def refuse(self, reason: str, *, retry: bool) -> None:
        self.lease()
        refused = sampler_pb2.LeaseRefused(reason=reason, retry=retry)
        self.send(sampler_pb2.SamplerReply(refused=refused).SerializeToString())
        self.close()

    def ready(self, *rows: tuple[int, int, int, int]) -> None:
        """(row, ticket, tag, position) each, in one packet."""
        ready = sampler_pb2.LogitsReady(
            rows=[
                sampler_pb2.ReadyRow(row=row, ticket=ticket, tag=tag, position=position)
                for row, ticket, tag, position in rows
            ]
        )
        self.send(sampler_pb2.SamplerReply(ready=ready).SerializeToString())

    def send(self, packet: bytes, *fds: int) -> None:
        """Descriptors are taken over."""
        if fds:
            socket.send_fds(self._socket, [packet], list(fds))
        else:
            self._socket.send(packet)
        for fd in fds:
            os.close(fd)

    def close(self) -> None:
        self._socket.close()
        if self._rows is not None:
            self._rows.mapping.close()
            self._rows = None

    def _receive(self) -> sampler_pb2.SamplerMessage | None:
        try:
            packet = self._socket.recv(1 << 17)
        except ConnectionResetError:  # it had not read everything
            return None
        return sampler_pb2.SamplerMessage.FromString(packet) if packet else None


class FakeSamplerEngine:
    """Listens in a run directory; `stop` and `start` are a scheduler that is restarted."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.peers: list[Peer] = []
        self._listener: socket.socket | None = None
        self._pool = ThreadPoolExecutor(2)

    def start(self, backlog: int = 8) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = self.run_dir / "samplers.sock"
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        self._listener.listen(backlog)

    def stop(self) -> None:
        """Its connections end; what had not been accepted, too."""
        for peer in self.peers:
            peer.close()
        self.peers.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def accept(self) -> Peer:
        assert self._listener is not None
        assert select.select([self._listener], [], [], SECONDS)[0], "nobody connects"
        peer = Peer(self._listener.accept()[0])
        self.peers.append(peer)
        return peer

    def opening(
        self, draw: Draw, *, num_rows: int = 2, timeout: float = SECONDS
    ) -> "Future[ExternalSampler]":
        """Make a sampler in another thread: it waits for what the test makes the engine say."""
        return self._pool.submit(
            ExternalSampler, self.run_dir, draw, num_rows=num_rows, timeout=timeout
        )

    def opened(self, draw: Draw, *, num_rows: int = 2) -> tuple[ExternalSampler, Peer]:
        """A sampler whose lease is granted."""
        opening = self.opening(draw, num_rows=num_rows)
        peer = self.accept()
        peer.grant()
        return opening.result(SECONDS), peer

    def close(self) -> None:
        self.stop()
        self._pool.shutdown()


@contextmanager
def fake_sampler_engine(run_dir: Path) -> Iterator[FakeSamplerEngine]:
    """Started; stopped at the end."""
    engine = FakeSamplerEngine(run_dir)
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


def argmax(row: LogitsRow) -> int:
    """A draw."""
    return max(range(len(row.logits)), key=row.logits.__getitem__)


def peaked(*peaks: int) -> list[float]:
    """Logits that fall from the first of the ids to the last; all others are below."""
    logits = [-1.0] * VOCABULARY
    for height, token_id in enumerate(reversed(peaks)):
        logits[token_id] = 1.0 + height
    return logits


class Broken(RuntimeError):
    """What a draw of a test raises."""


def broken(row: LogitsRow) -> int:
    """A draw that cannot."""
    raise Broken(f"cannot draw {row.position}")


def open_files() -> list[str]:
    """What this process holds open of what a sampler and its engine may."""
    links = [_read_link(each) for each in Path("/proc/self/fd").iterdir()]
    packets = _packet_sockets()
    return sorted(
        link
        for link in links
        if link.startswith(("/memfd:triptych-logits", "/dev/null")) or link in packets
    )


def _read_link(path: Path) -> str:
    try:
        return str(path.readlink())
    except FileNotFoundError:  # the folder's own descriptor
        return ""


def _packet_sockets() -> set[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    packets = (line.split() for line in lines)
    return {f"socket:[{each[6]}]" for each in packets if int(each[4], 16) == socket.SOCK_SEQPACKET}


def mapped_rows() -> int:
    """Mappings of rows in this process, the fake engine's included."""
    return Path("/proc/self/maps").read_text().count("memfd:triptych-logits")
