"""services/transport/channel.py and fd_passing.py: bounds, malformed frames, dead peers."""

import gc
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from triptych.services.transport import fd_passing
from triptych.services.transport.channel import (
    MAX_FRAME_BYTES,
    QUEUE_FRAMES,
    DealerChannel,
    Received,
    RouterChannel,
    beat_identity,
    beat_owner,
    new_identity,
)
from triptych.services.transport.fd_passing import FdListener, Offer, OfferError
from triptych.v1 import stage_pb2
from triptych.v1.stage_pb2 import TokenizerMessage, TokenizerReply

Router = RouterChannel[TokenizerMessage, TokenizerReply]
Dealer = DealerChannel[TokenizerReply, TokenizerMessage]
HELLO = TokenizerMessage(hello=stage_pb2.TokenizerHello(protocol_version=1))
SECONDS = 30  # for anything that must come
BEAT = TokenizerReply(beat=stage_pb2.SchedulerBeat(epoch=3))


class Wires:
    """Channels over one socket in a folder of the test's own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router: Router = RouterChannel(self.context, f"ipc://{path}", TokenizerMessage)
        self._dealers: list[Dealer] = []

    def dealer(self) -> Dealer:
        endpoint = f"ipc://{self.path}"
        dealer: Dealer = DealerChannel(
            self.context, endpoint, TokenizerReply, new_identity("tokenizer-0")
        )
        self._dealers.append(dealer)
        return dealer

    def received(self) -> Received[TokenizerMessage]:
        assert self.router.socket.poll(SECONDS * 1000)
        [received] = self.router.receive()
        return received

    def close(self) -> None:
        self.router.close()
        for dealer in self._dealers:
            dealer.close()
        self.context.term()


@pytest.fixture
def wires(tmp_path: Path) -> Iterator[Wires]:
    wires = Wires(tmp_path / "s.zmq")
    yield wires
    wires.close()


def test_there_and_back(wires: Wires) -> None:
    peer = wires.dealer()
    assert peer.send(HELLO)
    received = wires.received()
    assert received.peer == peer.identity
    assert received.message == HELLO
    assert wires.router.send(received.peer, BEAT)
    assert peer.wait(SECONDS)
    assert list(peer.receive()) == [BEAT]
    assert list(wires.router.receive()) == []
    assert wires.path.stat().st_mode & 0o777 == 0o600


def test_a_peer_that_is_gone_is_told(wires: Wires) -> None:
    assert not wires.router.send(b"nobody", BEAT)
    peer = wires.dealer()
    peer.send(HELLO)
    received = wires.received()
    peer.close()
    for _ in range(SECONDS * 100):
        if not wires.router.send(received.peer, BEAT):
            return
        wires.router.socket.poll(10)
    pytest.fail("the router did not notice")


def test_a_peer_that_does_not_read_is_bounded(wires: Wires) -> None:
    peer = wires.dealer()
    peer.send(HELLO)
    received = wires.received()
    large = TokenizerReply(outputs=stage_pb2.StepOutputs(slots=bytes(4096)))
    sent = 0
    while wires.router.send(received.peer, large):
        sent += 1
        assert sent < 4 * QUEUE_FRAMES
    assert sent >= QUEUE_FRAMES


@pytest.mark.parametrize(
    "frames",
    [
        [b"\xff" * 100],
        [b""],
        [HELLO.SerializeToString()[:-1]],
        [b"", HELLO.SerializeToString()],
        [HELLO.SerializeToString()] * 2,
        [b"\x80\x04\x95\x0b\0\0\0\0\0\0\0}\x94\x8c\x01a\x94K\x01s."],  # a pickle
        [b"\x0a\xff\xff\xff\xff\x7f"],  # says that gigabytes follow
        [b"\x98\x06\x01"],  # a field that nobody knows
    ],
)
def test_malformed_frames_are_counted(wires: Wires, frames: list[bytes]) -> None:
    peer = wires.dealer()
    peer.socket.send_multipart(frames)
    received = wires.received()
    assert received.message is None
    assert wires.router.malformed_total == 1
    wires.router.socket.send_multipart([peer.identity, b"\xff\xff"])
    assert wires.router.send(received.peer, BEAT)
    got: list[TokenizerReply] = []
    while not got and peer.wait(SECONDS):
        got += peer.receive()
    assert got == [BEAT]
    assert peer.malformed_total == 1


def test_raw_bytes_on_the_socket_do_no_harm(wires: Wires) -> None:
    greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL".ljust(64, b"\0")
    gigabyte = greeting + b"\x06" + struct.pack(">Q", 2**30) + b"x" * 100
    for junk in (b"", b"\0", os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", greeting[:30], gigabyte):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(wires.path))
            raw.sendall(junk)
    oversized = wires.dealer()
    oversized.socket.send(bytes(MAX_FRAME_BYTES + 1))
    wires.dealer().send(HELLO)
    said: list[TokenizerMessage | None] = []
    while HELLO not in said:  # what looks like a ZMTP 1.0 frame arrives, and is counted
        assert wires.router.socket.poll(SECONDS * 1000)
        said += [received.message for received in wires.router.receive()]
    assert said.count(None) == wires.router.malformed_total == len(said) - 1


def test_identities() -> None:
    one, other = new_identity("executor-0"), new_identity("executor-0")
    assert one != other
    assert beat_owner(beat_identity(one)) == one
    assert beat_owner(one) == one
    assert len(one) <= fd_passing.MAX_IDENTITY_BYTES


def test_descriptors_cross_both_ways(tmp_path: Path) -> None:
    listener = FdListener(tmp_path / "fds")
    assert (tmp_path / "fds").stat().st_mode & 0o777 == 0o600
    assert listener.accept() is None
    near = fd_passing.connect(tmp_path / "fds", timeout=SECONDS)
    far = listener.accept()
    assert far is not None
    with pytest.raises(BlockingIOError):
        far.receive()
    fd = os.memfd_create("x", os.MFD_CLOEXEC)
    os.write(fd, b"hello")
    near.send(Offer(2**64 - 1, b"executor-0:1", fd))
    offer = far.receive()
    assert offer is not None
    assert (offer.epoch, offer.identity) == (2**64 - 1, b"executor-0:1")
    assert os.pread(offer.fd, 5, 0) == b"hello"
    assert not os.get_inheritable(offer.fd)
    far.send(offer)
    back = near.receive()
    assert back is not None
    assert os.pread(back.fd, 5, 0) == b"hello"
    near.close()
    assert far.receive() is None  # end of file
    for each in (fd, offer.fd, back.fd):
        os.close(each)
    far.close()
    listener.close()


def test_packets_keep_their_borders_and_their_bound(tmp_path: Path) -> None:
    listener = FdListener(tmp_path / "fds")
    near = fd_passing.connect(tmp_path / "fds", timeout=SECONDS)
    far = listener.accept()
    assert far is not None
    near.send_packet(b"one")
    near.send_packet(b"two" * 1000)
    assert far.receive_packet() == b"one"
    assert far.receive_packet() == b"two" * 1000
    with pytest.raises(BlockingIOError):
        far.receive_packet()
    near.send_packet(b"x" * (fd_passing.MAX_PACKET_BYTES + 1))
    with pytest.raises(OfferError):
        far.receive_packet()
    near.send_packet(b"last words")
    near.close()
    assert far.receive_packet() == b"last words"
    assert far.receive_packet() is None
    with pytest.raises(OSError, match="pipe"):
        far.send_packet(b"to nobody")
    far.close()
    listener.close()


def open_files() -> int:
    gc.collect()  # what earlier tests left to the collector must not go in the middle of this one
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("count", [0, 1, 2, 4])
@pytest.mark.parametrize("packet", [b"x", b"x" * 64, b"x" * 65, b"x" * 5000])
def test_what_is_no_offer_is_refused(tmp_path: Path, packet: bytes, count: int) -> None:
    listener = FdListener(tmp_path / "fds")
    before = open_files()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.connect(str(tmp_path / "fds"))
        far = listener.accept()
        assert far is not None
        fds = [os.memfd_create("x") for _ in range(count)]
        socket.send_fds(raw, [packet], fds)
        for fd in fds:
            os.close(fd)
        with pytest.raises(OfferError, match="not an offer"):
            far.receive()
        far.close()
    assert open_files() == before
    listener.close()


def test_a_packet_with_a_descriptor(tmp_path: Path) -> None:
    listener = FdListener(tmp_path / "fds")
    before = open_files()
    near = fd_passing.connect(tmp_path / "fds", timeout=SECONDS)
    far = listener.accept()
    assert far is not None
    memory = os.memfd_create("x")
    os.write(memory, b"rows")
    far.send_packet_with(b"offer", memory)
    far.send_packet(b"y" * fd_passing.MAX_PACKET_BYTES)
    os.close(memory)
    received = near.receive_packet_with()
    assert received is not None
    packet, fd = received
    assert packet == b"offer"
    assert fd is not None
    assert os.pread(fd, 9, 0) == b"rows"
    assert not os.get_inheritable(fd)
    os.close(fd)
    assert near.receive_packet_with() == (b"y" * fd_passing.MAX_PACKET_BYTES, None)
    near.set_timeout(0.0)
    with pytest.raises(BlockingIOError):
        near.receive_packet_with()
    near.send_packet(b"unread")  # its reset comes before what was said, which counts
    far.send_packet(b"last words")
    far.close()
    assert near.receive_packet_with() == (b"last words", None)
    assert near.receive_packet_with() is None
    near.close()
    assert open_files() == before
    listener.close()


@pytest.mark.parametrize(("size", "count"), [(9, 2), (9, 6), (fd_passing.MAX_PACKET_BYTES + 1, 1)])
def test_descriptors_that_nobody_asked_for_are_closed(
    tmp_path: Path, size: int, count: int
) -> None:
    listener = FdListener(tmp_path / "fds")
    before = open_files()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.connect(str(tmp_path / "fds"))
        far = listener.accept()
        assert far is not None
        fds = [os.memfd_create("x") for _ in range(count)]
        socket.send_fds(raw, [b"x" * size], fds)
        socket.send_fds(raw, [b"drawn"], fds)
        for fd in fds:
            os.close(fd)
        with pytest.raises(OfferError, match=r"more than one descriptor or more than 65536 bytes"):
            far.receive_packet_with()
        assert far.receive_packet() == b"drawn"
        far.close()
    assert open_files() == before
    listener.close()
