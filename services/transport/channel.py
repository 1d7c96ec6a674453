"""Protobuf frames over ZeroMQ: the scheduler's ROUTER and its peers' DEALER.

A frame that does not parse is the peer's fault and is reported as such, never raised: nobody who
can open the socket can stop the loop. Sizes and queues are bounded. A socket belongs to one thread.
"""

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import zmq
from google.protobuf.message import DecodeError, Message

PROTOCOL_VERSION = 6
MAX_FRAME_BYTES = 32 * 2**20
QUEUE_FRAMES = 4096
"""Frames that may wait in each direction for one peer that does not read."""

_BEAT_SUFFIX = b"/beat"

Incoming = TypeVar("Incoming", bound=Message)
Outgoing = TypeVar("Outgoing", bound=Message)


def new_identity(name: str) -> bytes:
    """A ZeroMQ identity that no other process has, however often `name` restarts."""
    return f"{name}:{secrets.token_hex(8)}".encode()


def beat_identity(identity: bytes) -> bytes:
    """Identity of the second socket of a process, from which a thread of its own sends beats."""
    return identity + _BEAT_SUFFIX


def beat_owner(identity: bytes) -> bytes:
    """The main identity that a frame from `identity` speaks for."""
    return identity.removesuffix(_BEAT_SUFFIX)


@dataclass(frozen=True, slots=True)
class Received(Generic[Incoming]):
    """One frame from a peer; `message` is None when it was malformed."""

    peer: bytes
    message: Incoming | None


def _parse(kind: type[Incoming], frames: list[bytes]) -> Incoming | None:
    if len(frames) != 1:
        return None
    try:
        message = kind.FromString(frames[0])
    except (DecodeError, RecursionError):
        return None
    # All stage messages are one oneof: a frame that sets nothing we know says nothing.
    return message if message.ListFields() else None


class RouterChannel(Generic[Incoming, Outgoing]):
    """The bound end: many peers, told apart by identity.

    Take the run directory's lock first: a second bind on an ipc path silently takes it over.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, incoming: type[Incoming]
    ) -> None:
        self._incoming = incoming
        self.malformed_total = 0
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        _bound(self.socket)
        self.socket.bind(endpoint)
        if endpoint.startswith("ipc://"):
            Path(endpoint.removeprefix("ipc://")).chmod(0o600)

    def receive(self, limit: int = 256) -> Iterator[Received[Incoming]]:
        """What has arrived, at most `limit` frames, without waiting."""
        for _ in range(limit):
            try:
                peer, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = _parse(self._incoming, frames)
            self.malformed_total += message is None
            yield Received(peer, message)

    def send(self, peer: bytes, message: Outgoing) -> bool:
        """Queue one frame; False when the peer is gone or does not read: forget it then."""
        try:
            self.socket.send_multipart([peer, message.SerializeToString()], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def close(self) -> None:
        """Drop what is unsent and close."""
        self.socket.close(linger=0)


class DealerChannel(Generic[Incoming, Outgoing]):
    """The connecting end. ZeroMQ reconnects by itself; frames sent meanwhile wait, bounded."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        incoming: type[Incoming],
        identity: bytes,
    ) -> None:
        self._incoming = incoming
        self.identity = identity
        self.malformed_total = 0
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, identity)
        _bound(self.socket)
        self.socket.connect(endpoint)

    @property
    def fd(self) -> int:
        """For add_reader. Edge-triggered: drain receive() after every event and every send."""
        return int(self.socket.getsockopt(zmq.FD))

    def receive(self, limit: int = 1024) -> Iterator[Incoming]:
        """What has arrived, at most `limit` frames, without waiting; malformed ones are counted."""
        for _ in range(limit):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = _parse(self._incoming, frames)
            if message is None:
                self.malformed_total += 1
            else:
                yield message

    def send(self, message: Outgoing) -> bool:
        """Queue one frame; False when QUEUE_FRAMES already wait for the scheduler."""
        try:
            self.socket.send(message.SerializeToString(), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def wait(self, timeout: float) -> bool:
        """Block until something can be received, at most `timeout` seconds."""
        return bool(self.socket.poll(int(timeout * 1000), zmq.POLLIN))

    def close(self) -> None:
        """Drop what is unsent and close."""
        self.socket.close(linger=0)


def _bound(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, QUEUE_FRAMES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_FRAMES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    # A scheduler that was started again is found within so many milliseconds of its listening.
    socket.setsockopt(zmq.RECONNECT_IVL, 10)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 50)


def wake_descriptor() -> int:
    """An eventfd by which another thread ends a poll: `os.eventfd_write(fd, 1)`."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
