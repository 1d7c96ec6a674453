"""A safetensors file, mapped: its tensors as views in the type that they are stored in."""

import json
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from triptych.services.executor.weights import check_shape
from triptych.services.runtime.lifecycle import StartupError

Floats = npt.NDArray[np.float32]
Stored = npt.NDArray[np.generic]

_DTYPES: dict[str, type[np.generic]] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,  # its bits
    "F8_E4M3": np.uint8,  # likewise
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
}
FLOAT_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class StoredArray:
    """A tensor of any shape: `num_bytes` of the mapping from `offset` on."""

    source: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: mmap.mmap
    offset: int
    num_bytes: int

    @property
    def values(self) -> Stored:
        """A view; bfloat16 as its bits."""
        raw = np.frombuffer(self.data, np.uint8, self.num_bytes, self.offset)
        return raw.view(_DTYPES[self.dtype]).reshape(self.shape)

    def floats(self, part: Stored) -> Floats:
        """`part` of the values as float32; a copy."""
        if self.dtype != "BF16":
            return part.astype(np.float32)
        return (part.astype(np.uint32) << 16).view(np.float32)

    def check(self, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> "StoredArray":
        """Itself. Raises StartupError unless it has one of these dtypes and this shape."""
        if self.dtype not in dtypes or self.dtype not in _DTYPES:
            raise StartupError(
                f"{self.source}: tensor {self.name} has dtype {self.dtype}, which is not "
                f"supported ({', '.join(dtypes)} {'is' if len(dtypes) == 1 else 'are'})"
            )
        check_shape(self.source, self.name, self.shape, shape)
        return self


class Shard:
    """A mapped file whose header the library has checked. Raises StartupError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with safe_open(path, framework="np") as file:
                self._names = set(file.keys())
            with path.open("rb") as raw:
                (length,) = struct.unpack("<Q", raw.read(8))
                self._header = json.loads(raw.read(length))
                self._data = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
        except SafetensorError as error:
            raise StartupError(f"{path}: broken safetensors file: {error}") from error
        except OSError as error:
            raise StartupError(f"{path}: {error.strerror or error}") from error
        self._start = 8 + length

    def array(self, name: str) -> StoredArray:
        """A tensor of the file. Raises StartupError when it is missing."""
        if name not in self._names:
            raise StartupError(f"{self._path}: tensor {name} is missing from this file")
        entry = self._header[name]
        begin, end = entry["data_offsets"]
        return StoredArray(
            source=str(self._path),
            name=name,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            data=self._data,
            offset=self._start + begin,
            num_bytes=end - begin,
        )


def release_pages(data: mmap.mmap, start: int, stop: int) -> None:
    """Let go of the pages of [start, stop) of a mapping: the file has them still."""
    start = start // mmap.PAGESIZE * mmap.PAGESIZE
    # The last page may hold what is read next, unless there is no next.
    length = (stop - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        data.madvise(mmap.MADV_DONTNEED, start, length)
