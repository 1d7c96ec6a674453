"""HTTP over a bare socket, for clients that no library would be: they leave, or do not read."""

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

from engine import Engine

Json = dict[str, Any]


def request_bytes(
    path: str, body: Mapping[str, object] | bytes, headers: Mapping[str, str] | None = None
) -> bytes:
    """A whole POST."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n{more}\r\n"
    )
    return head.encode() + content


class RawHttp:
    """One connection. `received`: all that has come."""

    def __init__(self, engine: Engine, *, receive_buffer: int = 0, timeout: float = 20.0) -> None:
        """`receive_buffer`: bytes that the kernel keeps for a reader that does not read."""
        host, _, port = engine.http_address.rpartition(":")
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(timeout)
        self.socket.connect((host, int(port)))
        self.received = b""

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self) -> bool:
        """Some more; False when the server has closed."""
        data = self.socket.recv(1 << 16)
        self.received += data
        return bool(data)

    def read_until(self, text: bytes, count: int = 1) -> None:
        """Until `text` has come `count` times. Raises EOFError where the server closes before."""
        while self.received.count(text) < count:
            if not self.read():
                raise EOFError(self.received[-500:])

    def answer(self) -> tuple[int, Json]:
        """Read a whole answer of known length: status and JSON. What follows stays."""
        self.read_until(b"\r\n\r\n")
        head, _, rest = self.received.partition(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        while len(rest) < size:
            assert self.read(), "cut off"
            rest = self.received.partition(b"\r\n\r\n")[2]
        self.received = rest[size:]
        return int(head.split()[1]), json.loads(rest[:size])

    def events(self) -> list[Json]:
        """Data of the whole events that have come; that of [DONE] is empty."""
        body = self._unchunked()
        blocks = body.split(b"\n\n")[:-1]
        data = [block[6:] for block in blocks if block.startswith(b"data: ")]
        return [json.loads(each) if each != b"[DONE]" else {} for each in data]

    def token_ids(self) -> list[int]:
        """Of a stream with return_token_ids."""
        return [
            token
            for event in self.events()
            for choice in event.get("choices", ())
            for token in choice.get("token_ids") or ()
        ]

    def fin(self) -> None:
        """Close, as a client that ends does."""
        self.socket.close()

    def rst(self) -> None:
        """Close at once, as one does whose machine says that nobody has this socket."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def half_close(self) -> None:
        """Say that nothing more will be sent, and go on listening."""
        self.socket.shutdown(socket.SHUT_WR)

    def _unchunked(self) -> bytes:
        rest = self.received.partition(b"\r\n\r\n")[2]
        body = b""
        while b"\r\n" in rest:
            size, _, rest = rest.partition(b"\r\n")
            count = int(size, 16)
            if not count or len(rest) < count:
                break
            body += rest[:count]
            rest = rest[count + 2 :]
        return body
