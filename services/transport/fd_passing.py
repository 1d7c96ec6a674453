"""Unix sockets that descriptors of rings cross: of the executor, with the steps, and of samplers.

A SOCK_SEQPACKET connection to an executor carries one Offer each way (with the descriptor of the
sender's ring), and from then on a packet for each StepReady and StepDone: the kernel wakes the
reader at once, where ZeroMQ would go through an I/O thread on each side. Its end of file tells at
once that the peer is gone, also after kill -9, and comes after everything that the peer had said.
What a program that draws tokens itself says and hears are packets too; one brings a descriptor.
"""

import os
import socket
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path

_OFFER = struct.Struct("<8sQB47s")
_MAGIC = b"TRIPFDS1"
MAX_IDENTITY_BYTES = 47
MAX_PACKET_BYTES = 1 << 16
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class OfferError(Exception):
    """A packet on the descriptor socket that is not an offer, or comes from another user."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One ring. `identity` is the executor's on ZeroMQ: it joins the two channels."""

    epoch: int
    identity: bytes
    fd: int


class FdConnection:
    """One end of an established connection. Never blocks for longer than `timeout` seconds."""

    def __init__(self, sock: socket.socket, timeout: float) -> None:
        self._socket = sock
        self._socket.settimeout(timeout)
        uid = _peer_uid(sock)
        if uid != os.geteuid():
            sock.close()
            raise OfferError(f"the peer on the descriptor socket has uid {uid}, not ours")

    def fileno(self) -> int:
        """For a poller: readable on a packet and on end of file."""
        return self._socket.fileno()

    def set_timeout(self, timeout: float) -> None:
        """Seconds that a call may block for from now on."""
        self._socket.settimeout(timeout)

    def send(self, offer: Offer) -> None:
        """Hand the offer's descriptor to the peer; ours stays open. Raises OSError."""
        packet = _OFFER.pack(_MAGIC, offer.epoch, len(offer.identity), offer.identity)
        socket.send_fds(self._socket, [packet], [offer.fd], socket.MSG_NOSIGNAL)

    def receive(self) -> Offer | None:
        """The peer's offer, or None at end of file. The caller owns its descriptor.

        Raises OfferError for anything else, TimeoutError or BlockingIOError when nothing came.
        """
        try:
            packet, fds, cut = self._receive_with(_OFFER.size)
        except ConnectionError:
            return None
        if not packet and not fds:
            return None
        whole = len(packet) == _OFFER.size and not cut
        if not whole or len(fds) != 1 or not packet.startswith(_MAGIC):
            for fd in fds:
                os.close(fd)
            raise OfferError(f"{len(packet)} bytes with {len(fds)} descriptors are not an offer")
        _, epoch, length, identity = _OFFER.unpack(packet)
        return Offer(epoch, identity[:length], fds[0])

    def send_packet(self, packet: bytes) -> None:
        """Send 1 to MAX_PACKET_BYTES bytes. Raises OSError when the peer is gone or stuck."""
        self._socket.send(packet, socket.MSG_NOSIGNAL)

    def receive_packet(self) -> bytes | None:
        """The peer's next packet, or None at end of file.

        Raises TimeoutError or BlockingIOError when nothing came; OfferError for an overlong packet.
        """
        try:
            packet = self._recv()
        except ConnectionError:
            return None
        if len(packet) > MAX_PACKET_BYTES:
            raise OfferError(f"a packet of more than {MAX_PACKET_BYTES} bytes")
        return packet or None

    def send_packet_with(self, packet: bytes, fd: int) -> None:
        """Likewise, with a descriptor for the peer; ours stays open."""
        socket.send_fds(self._socket, [packet], [fd], socket.MSG_NOSIGNAL)

    def receive_packet_with(self) -> tuple[bytes, int | None] | None:
        """The peer's next packet, with its descriptor if it brings one; or None at end of file. The
        caller owns the descriptor.

        Raises as receive_packet, and OfferError for more than one descriptor.
        """
        try:
            packet, fds, cut = self._receive_with(MAX_PACKET_BYTES)
        except ConnectionError:
            return None
        if cut or len(fds) > 1 or len(packet) > MAX_PACKET_BYTES:
            for fd in fds:
                os.close(fd)
            raise OfferError(
                f"a packet of {len(packet)} bytes with more than one descriptor or"
                f" more than {MAX_PACKET_BYTES} bytes"
            )
        if not packet and not fds:
            return None
        return packet, fds[0] if fds else None

    def _recv(self) -> bytes:
        try:
            return self._socket.recv(MAX_PACKET_BYTES + 1)
        except ConnectionResetError:
            # It closed with packets of ours unread. The kernel says so once, before what the peer
            # had sent, which still counts.
            return self._socket.recv(MAX_PACKET_BYTES + 1)

    def _receive_with(self, most: int) -> tuple[bytes, list[int], bool]:
        """(up to `most` bytes or one more, descriptors, whether some of them did not fit); recv_fds
        would ignore its flags."""
        fds = array("i")
        room = most + 1, socket.CMSG_SPACE(4 * fds.itemsize), socket.MSG_CMSG_CLOEXEC
        try:
            packet, control, flags, _ = self._socket.recvmsg(*room)
        except ConnectionResetError:  # as in _recv
            packet, control, flags, _ = self._socket.recvmsg(*room)
        for level, kind, data in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        return packet, fds.tolist(), bool(flags & socket.MSG_CTRUNC)

    def close(self) -> None:
        """The peer sees end of file."""
        self._socket.close()


class FdListener:
    """The end that is connected to. Take the run directory's lock first: it takes the path over."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(path))
        path.chmod(0o600)
        self._socket.listen(8)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """For a poller: readable when somebody connects."""
        return self._socket.fileno()

    def accept(self) -> FdConnection | None:
        """The next connection, non-blocking; None when there is none. Raises OfferError."""
        try:
            sock, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return None
        return FdConnection(sock, timeout=0.0)

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


def connect(path: Path, timeout: float) -> FdConnection:
    """Reach a listener. Raises OSError, OfferError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(timeout)
        sock.connect(str(path))
    except OSError:
        sock.close()
        raise
    return FdConnection(sock, timeout)


def _peer_uid(sock: socket.socket) -> int:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    uid: int = _PEER_CREDENTIALS.unpack(raw)[1]
    return uid
