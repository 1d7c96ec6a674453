"""What a GGUF file says about itself: metadata and tensor places, from a bounded and checked walk.

A model file is input from outside: every length is compared with the bytes left before it is used,
every type before it is read. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
(versions 2 and 3, little-endian). Knows nothing of torch, nor of any architecture.
"""

import contextlib
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from triptych.services.runtime.lifecycle import StartupError

_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_STRINGS = 1 << 23  # of one array: far above any vocabulary
_MAX_DIMS = 4
_MAX_NAME = 1 << 16
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20

Scalar = int | float | bool | str
Value = Scalar | list[int] | list[float] | list[bool] | list[str]


class TensorType(IntEnum):
    """Element types that can be loaded; their numbers in the format."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30


BLOCKS: dict[TensorType, tuple[int, int]] = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.BF16: (1, 2),
    TensorType.Q4_0: (32, 18),
    TensorType.Q4_1: (32, 20),
    TensorType.Q5_0: (32, 22),
    TensorType.Q5_1: (32, 24),
    TensorType.Q8_0: (32, 34),
    TensorType.Q4_K: (256, 144),
    TensorType.Q5_K: (256, 176),
    TensorType.Q6_K: (256, 210),
}
"""Type -> (elements, bytes) of one block."""

_TYPES = {int(kind): kind for kind in TensorType}
_OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
    40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: `shape` in row-major order (the file's dimensions reversed), place in bytes."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A checked file. Every tensor lies inside it. `data` is the whole file, mapped read-only."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]
    data: mmap.mmap

    def text(self, key: str) -> str | None:
        """A string value, None when absent. Raises StartupError when it is of another type."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise self.broken(f"{key} is not a string")
        return value

    def integer(self, key: str) -> int | None:
        """A whole number, None when absent. Raises StartupError when it is of another type."""
        value = self.metadata.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self.broken(f"{key} is not a whole number")
        return value

    def number(self, key: str) -> float | None:
        """A number, None when absent. Raises StartupError when it is of another type."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.broken(f"{key} is not a number")
        return float(value)

    def broken(self, what: str) -> StartupError:
        """The error to raise when the file's contents contradict themselves."""
        return StartupError(f"{self.path}: broken GGUF file: {what}")


def open_gguf(path: str | Path) -> GgufFile:
    """Map and check a file. Raises StartupError, naming what is wrong and where.

    Costs less than a millisecond per thousand strings; memory stays below a few times the header.
    """
    path = Path(path)
    handed = _take_handed(path)
    if handed is not None:
        return handed
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise StartupError(f"{path}: broken GGUF file: it has no header")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}") from error
    walk = _Walk(path, data)
    num_tensors = walk.start()
    metadata = walk.metadata()
    tensors = walk.tensors(num_tensors, metadata)
    return GgufFile(path, metadata, tensors, data)


def hand_down(file: GgufFile) -> None:
    """Let the next `open_gguf` of this file take it as it is, here and in each process forked from
    here, unless the file has changed meanwhile. Walking a header takes longer than most of a start.
    """
    with contextlib.suppress(OSError):  # whoever opens it next says what is wrong
        _handed.append((_identity(file.path), file))


def drop_handed() -> None:
    """Forget files that nobody came for: a vocabulary takes many times its size in the file."""
    _handed.clear()


def _take_handed(path: Path) -> GgufFile | None:
    while _handed:
        identity, file = _handed.pop()
        try:
            if file.path == path and _identity(path) == identity:
                return file
        except OSError:
            continue
    return None


_handed: list[tuple[tuple[int, ...], GgufFile]] = []


def _identity(path: Path) -> tuple[int, ...]:
    facts = path.stat()
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


class _Walk:
    """A cursor over the header that never passes the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0
        self._num_keys = 0

    def _broken(self, what: str) -> StartupError:
        return StartupError(f"{self._path}: broken GGUF file: {what}")

    def _need(self, count: int, what: str) -> None:
        if count > self._size - self._at:
            raise self._broken(f"{what} at byte {self._at} passes the end of the file")

    def _scalar(self, code: str, what: str) -> int:
        size = struct.calcsize("<" + code)
        self._need(size, what)
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += size
        return int(value)

    def _string(self, what: str, limit: int | None = None) -> str:
        length = self._scalar("Q", f"length of {what}")
        self._need(length, what)
        if limit is not None and length > limit:
            raise self._broken(f"{what} has {length} bytes, more than {limit}")
        raw = self._data[self._at : self._at + length]
        self._at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._broken(f"{what} at byte {self._at - length} is not UTF-8") from error

    def start(self) -> int:
        """Read the fixed part; returns the number of tensors."""
        if self._data[:4] != b"GGUF":
            raise StartupError(f"{self._path}: not a GGUF file")
        self._at = 4
        version = self._scalar("I", "version")
        if version not in (2, 3):
            raise StartupError(
                f"{self._path}: GGUF version {version} is not supported (2 or 3, little-endian)"
            )
        num_tensors = self._scalar("Q", "number of tensors")
        self._num_keys = self._scalar("Q", "number of keys")
        for name, count, limit in (
            ("tensors", num_tensors, _MAX_TENSORS),
            ("keys", self._num_keys, _MAX_KEYS),
        ):
            if count > limit:
                raise self._broken(f"{count} {name}, more than {limit}")
        return num_tensors

    def metadata(self) -> dict[str, Value]:
        """Read all key-value pairs."""
        out: dict[str, Value] = {}
        for _ in range(self._num_keys):
            key = self._string("a key", _MAX_NAME)
            if key in out:
                raise self._broken(f"key {key} occurs twice")
            kind = self._scalar("I", f"type of {key}")
            out[key] = self._array(key) if kind == _ARRAY else self._value(kind, key)
        return out

    def _value(self, kind: int, key: str) -> Scalar:
        if kind == _STRING:
            return self._string(key)
        code = _SCALARS.get(kind)
        if code is None:
            raise self._broken(f"{key} has unknown type {kind}")
        size = struct.calcsize("<" + code)
        self._need(size, key)
        if kind == _BOOL:
            value: Scalar = self._data[self._at] != 0
        else:
            (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += size
        return value

    def _strings(self, key: str, count: int) -> list[str]:
        """`_string`, `count` times, in one loop: a vocabulary has 100,000 and start-up waits."""
        length_at, data, at = struct.Struct("<Q").unpack_from, self._data, self._at
        strings: list[str] = []
        append = strings.append
        start = end = at
        size = self._size
        try:
            for _ in range(count):
                start = end + 8
                end = start + length_at(data, end)[0]
                if end > size:  # before as much as the rest of the file is copied
                    break
                append(str(data[start:end], "utf-8"))
        except (struct.error, OverflowError):  # no room for a length, or the last string had none
            end = size + 1
        except UnicodeDecodeError as error:
            raise self._broken(f"{key} holds a string that is not UTF-8") from error
        if end > size:
            raise self._broken(f"{key} passes the end of the file behind byte {at}")
        self._at = end
        return strings

    def _array(self, key: str) -> Value:
        kind = self._scalar("I", f"element type of {key}")
        count = self._scalar("Q", f"length of {key}")
        if kind == _STRING:
            self._need(8 * count, key)
            if count > _MAX_STRINGS:
                raise self._broken(f"{key} has {count} strings, more than {_MAX_STRINGS}")
            return self._strings(key, count)
        code = _SCALARS.get(kind)
        if code is None:
            raise self._broken(f"{key} is an array of unsupported type {kind}")
        size = struct.calcsize("<" + code) * count
        self._need(size, key)
        values = list(struct.unpack_from(f"<{count}{code}", self._data, self._at))
        self._at += size
        return values

    def tensors(self, count: int, metadata: dict[str, Value]) -> dict[str, GgufTensor]:
        """Read the tensor table and place every tensor inside the file."""
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if (
            isinstance(alignment, bool)
            or not isinstance(alignment, int)
            or not 8 <= alignment <= _MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            raise self._broken(
                f"general.alignment {alignment!r:.40} is not a power of two "
                f"within 8 and {_MAX_ALIGNMENT}"
            )
        rows = [self._tensor(alignment) for _ in range(count)]
        start = -(-self._at // alignment) * alignment
        out: dict[str, GgufTensor] = {}
        for place in rows:
            tensor = place(start)
            if tensor.name in out:
                raise self._broken(f"tensor {tensor.name} occurs twice")
            if tensor.offset + tensor.num_bytes > self._size:
                raise self._broken(
                    f"tensor {tensor.name} ends at byte {tensor.offset + tensor.num_bytes}, "
                    f"the file at {self._size}"
                )
            out[tensor.name] = tensor
        return out

    def _tensor(self, alignment: int) -> Callable[[int], GgufTensor]:
        name = self._string("a tensor name", _MAX_NAME)
        num_dims = self._scalar("I", f"dimensions of {name}")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._broken(f"tensor {name} has {num_dims} dimensions, not 1 to {_MAX_DIMS}")
        dims = [self._scalar("Q", f"dimensions of {name}") for _ in range(num_dims)]
        number = self._scalar("I", f"type of {name}")
        offset = self._scalar("Q", f"offset of {name}")
        kind = _TYPES.get(number)
        if kind is None:
            what = _OTHER_TYPES.get(number, f"number {number}")
            have = ", ".join(each.name for each in TensorType)
            raise StartupError(
                f"{self._path}: tensor {name} has type {what}, which is not supported ({have} are)"
            )
        block, block_bytes = BLOCKS[kind]
        elements = 1
        for extent in dims:  # Python's integers do not wrap
            elements *= extent
        if elements < 1 or dims[0] % block:
            raise self._broken(f"tensor {name} of type {kind.name} has dimensions {dims}")
        if offset % alignment:
            raise self._broken(f"tensor {name}: offset {offset} is not a multiple of {alignment}")
        num_bytes = elements // block * block_bytes
        return lambda start: GgufTensor(
            name, tuple(reversed(dims)), kind, start + offset, num_bytes
        )
