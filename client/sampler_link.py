"""One connection of a sampler to its engine: a lease claimed, its rows, packets each way."""

import os
import socket
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from google.protobuf.message import DecodeError

from triptych.client.errors import SamplerError
from triptych.client.logits_rows import LAYOUT_VERSION, LogitsRows
from triptych.v1 import sampler_pb2

MAX_PACKET_BYTES = 1 << 16
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_MAX_FDS = 4


class NotNow(Exception):
    """No lease, but the same may be granted later."""


class SamplerLink:
    """A connection: `claim` it a lease, then `receive` and `send`. The thread that does so closes
    it; `shut` is for others.

    Raises NotNow when nobody listens, SamplerError when it is not an engine of this user.
    """

    def __init__(self, path: Path) -> None:
        self._rows: LogitsRows | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(0)  # it connects at once, or there is no room
            self._socket.connect(str(path))
            _check_peer(self._socket)
        except (FileNotFoundError, ConnectionError, BlockingIOError, TimeoutError) as error:
            self._socket.close()
            raise NotNow(f"nothing listens on {path}: {error.strerror or error}") from error
        except OSError as error:
            self._socket.close()
            raise SamplerError(f"{path}: {error.strerror or error}") from error
        except SamplerError:
            self._socket.close()
            raise

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
    def rows(self) -> LogitsRows:
        """Those of the lease."""
        assert self._rows is not None, "no lease was claimed"
        return self._rows

    def claim(self, lease: int, num_rows: int, seconds: float) -> None:
        """Have the lease granted. Raises NotNow, or SamplerError when it never will be."""
        request = sampler_pb2.LeaseRequest(
            layout_version=LAYOUT_VERSION, lease=lease, num_rows=num_rows
        )
        try:
            self._socket.settimeout(seconds)
            self._send(sampler_pb2.SamplerMessage(lease=request))
            packet, fds = self._receive_with_fds()
        except OSError as error:
            raise NotNow(f"the engine has no word on the lease: {error}") from error
        try:
            self._take(packet, fds)
        finally:
            for fd in fds:
                os.close(fd)
        self._socket.settimeout(None)

    def receive(self) -> Sequence[sampler_pb2.ReadyRow] | None:
        """Rows that wait for a token; None at the end of the connection.

        Raises SamplerError for what an engine never says.
        """
        try:
            packet = self._socket.recv(MAX_PACKET_BYTES + 1)
        except OSError:
            return None
        if not packet:
            return None
        reply = _reply(packet)
        if reply.WhichOneof("message") != "ready":
            raise SamplerError(f"the engine says {_name(reply)}, with the lease granted")
        for row in reply.ready.rows:
            if row.row >= self.rows.num_rows:
                raise SamplerError(f"the engine names row {row.row} of {self.rows.num_rows}")
        return reply.ready.rows

    def send(self, drawn: sampler_pb2.TokensDrawn) -> None:
        """Answer. At the end of the connection nobody hears it; `receive` tells."""
        try:
            self._send(sampler_pb2.SamplerMessage(drawn=drawn))
        except OSError:
            return

    def shut(self) -> None:
        """End the connection under a thread that waits in it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended

    def close(self) -> None:
        """End the connection, and with it the lease; unmap the rows."""
        self._socket.close()
        if self._rows is not None:
            self._rows.close()

    def _send(self, message: sampler_pb2.SamplerMessage) -> None:
        self._socket.send(message.SerializeToString(), socket.MSG_NOSIGNAL)

    def _take(self, packet: bytes, fds: list[int]) -> None:
        """Of the descriptors, the one that is used is taken out."""
        if not packet:
            raise NotNow("the engine ended the connection before it granted the lease")
        reply = _reply(packet)
        match reply.WhichOneof("message"):
            case "offer" if len(fds) == 1:
                self._rows = LogitsRows(fds.pop(), reply.offer)
            case "refused" if not reply.refused.retry:
                raise SamplerError(f"the engine refuses the lease: {reply.refused.reason}")
            case "refused":
                raise NotNow(f"the engine refuses the lease for now: {reply.refused.reason}")
            case _:
                raise SamplerError(
                    f"the engine answers with {_name(reply)} and {len(fds)} descriptors"
                )

    def _receive_with_fds(self) -> tuple[bytes, list[int]]:
        fds = array("i")
        packet, control, _, _ = self._socket.recvmsg(
            MAX_PACKET_BYTES + 1,
            socket.CMSG_SPACE(_MAX_FDS * fds.itemsize),
            socket.MSG_CMSG_CLOEXEC,
        )
        for level, kind, data in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        return packet, fds.tolist()


def _reply(packet: bytes) -> sampler_pb2.SamplerReply:
    if len(packet) > MAX_PACKET_BYTES:
        raise SamplerError(f"the engine sends a packet of more than {MAX_PACKET_BYTES} bytes")
    try:
        return sampler_pb2.SamplerReply.FromString(packet)
    except DecodeError as error:
        raise SamplerError(f"the engine sends {len(packet)} bytes that say nothing") from error


def _name(reply: sampler_pb2.SamplerReply) -> str:
    return reply.WhichOneof("message") or "nothing that is known here"


def _check_peer(sock: socket.socket) -> None:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    uid = _PEER_CREDENTIALS.unpack(raw)[1]
    if uid != os.geteuid():
        raise SamplerError(f"the engine on the socket has uid {uid}, not ours")
