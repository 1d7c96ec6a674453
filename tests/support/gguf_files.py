"""Writes GGUF files byte by byte, so that a test can make any part of one wrong."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

KINDS = {
    "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"),
    "i32": (5, "i"), "f32": (6, "f"), "bool": (7, "?"), "u64": (10, "Q"), "i64": (11, "q"),
    "f64": (12, "d"),
}  # fmt: skip
STRING, ARRAY = 8, 9


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def scalar(kind: str, value: float) -> bytes:
    number, code = KINDS[kind]
    return struct.pack("<I" + code, number, value)


def string(value: str | bytes, length: int | None = None) -> bytes:
    return struct.pack("<I", STRING) + text(value, length)


def strings(values: Sequence[str], count: int | None = None) -> bytes:
    head = struct.pack("<IIQ", ARRAY, STRING, len(values) if count is None else count)
    return head + b"".join(text(value) for value in values)


@dataclass(frozen=True)
class RawTensor:
    """`dims` in the file's order (fastest first); `offset` None means where it belongs."""

    name: str
    dims: Sequence[int]
    kind: int
    data: bytes
    offset: int | None = None
    num_dims: int | None = None


@dataclass(frozen=True)
class RawGguf:
    """A file's parts; the counts are written as they are given."""

    metadata: Mapping[str, bytes]
    tensors: Sequence[RawTensor]
    alignment: int = 32
    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None
    num_keys: int | None = None
    extra: bytes = field(default=b"")

    def write(self) -> bytes:
        """The bytes of the file."""
        count = len(self.tensors) if self.num_tensors is None else self.num_tensors
        keys = len(self.metadata) if self.num_keys is None else self.num_keys
        out = self.magic + struct.pack("<IQQ", self.version, count, keys)
        for key, value in self.metadata.items():
            out += text(key) + value
        at, body = 0, b""
        for tensor in self.tensors:
            at = len(body)
            dims = tensor.num_dims if tensor.num_dims is not None else len(tensor.dims)
            out += text(tensor.name) + struct.pack("<I", dims)
            out += struct.pack(f"<{len(tensor.dims)}Q", *tensor.dims)
            out += struct.pack("<IQ", tensor.kind, at if tensor.offset is None else tensor.offset)
            body += tensor.data + b"\0" * (-len(tensor.data) % self.alignment)
        return out + b"\0" * (-len(out) % self.alignment) + body + self.extra
